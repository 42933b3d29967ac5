"""kill -9 of gateway and driver while users talk: what they have got is kept, and trained once.

    python -m tests.crash.live --kills 100 --seed 1
    python -m tests.crash.live --kills 25 --seed 1 --first 50      a part of it: kills 50 to 74

Users talk to a run that learns from them alone. An answer counts as acknowledged when its last byte has come.
The gateway is started again by the driver; the driver is resumed, and finds the gateway that has outlived it,
or starts one, where both were killed at once.
Some kills hit what has just been started. In the end the run is stopped in an orderly way, and all that
was acknowledged is looked for in the journal and in the ledger: by session, by what was said and answered,
and by the number of tokens. Prints a line per kill and, as the last line, one JSON object. Exit code 1 if a
turn was lost, recorded twice or trained twice, if the audit is not clean, or if the run could not go on.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml

from benchmarks.live_users import Answered, Crowd, Habits
from slipstream.rollout.gateway.journal_file import JournalFile
from slipstream.rollout.ledger.audit.records import Records
from slipstream.rollout.ledger.rows.stored_turns import KEPT, named, session_of, turn_id
from slipstream.rollout.ledger.storage.database import LEDGER, open_for_reading
from slipstream.rollout.ledger.storage.segments import FOLDER, Segments
from slipstream.rollout.live.conversation import decode_said
from slipstream.rollout.reward.live import text_of
from slipstream.rollout.tokens.record import REF
from slipstream.rollout.tokens.turn_entries import Turn
from tests.chat_model import write_chat_model
from tests.environment import environment
from tests.ports import held_port
from tests.runs.conftest import RunProcess, run_command

NAME = "live"
KEY = "SGLANG_API_KEY"
USERS = 12
STARTED_S = 240
"""From a start to an answer on a busy machine."""
END_S = 120
ANSWERS = 48
"""Answers between two kills, unless the second one hits what has just been started."""
TELLING = 8
"""Tokens from which on an answer is like no other: they are sampled from random weights."""

VICTIMS = ("gateway", "driver", "gateway and driver")
MOMENTS = {"under load": 3, "just started": 1}


class LiveSweepFailed(AssertionError):
    """The run could not go on."""


@dataclass(frozen=True)
class LiveKill:
    """One act of violence, drawn from (seed, number)."""

    number: int
    victim: str
    moment: str
    delay_s: float

    @classmethod
    def draw(cls, seed: int, number: int) -> "LiveKill":
        rng = random.Random(f"{seed}:{number}")
        moment = rng.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        longest_s = {"under load": 2.0, "just started": 15.0}[moment]
        return cls(number, rng.choice(VICTIMS), moment, rng.uniform(0, longest_s))


@dataclass
class Account:
    """What became of the turns."""

    acknowledged: int = 0
    recorded: int = 0
    """Turns in the ledger."""
    trained: int = 0
    lost: list[str] = field(default_factory=list[str])
    """Acknowledged turns that are neither in the ledger nor in the journal."""
    doubled: list[str] = field(default_factory=list[str])
    """Answers that the ledger has twice."""
    trained_twice: list[str] = field(default_factory=list[str])
    discrepancies: list[str] = field(default_factory=list[str])
    """What the audit finds, and what journal and ledger say differently."""

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.doubled or self.trained_twice or self.discrepancies)


class LiveSweep:
    """One run with its users, over all of its starts."""

    def __init__(self, root: Path, say: Callable[[str], None]) -> None:
        self.folder = root / NAME
        self.say = say
        self.hits: Counter[str] = Counter()
        self.answers: list[Answered] = []
        self._root = root
        self._starts: list[RunProcess] = []
        self._recipe = root / "recipe.yaml"
        port = held_port()
        self._recipe.write_text(yaml.safe_dump(recipe(root, port, held_port())))
        self._key = os.urandom(16).hex()
        habits = Habits(every_s=0.5, turns=6, max_tokens=24, says=_words, ends=0.5)
        self.crowd = Crowd(
            f"http://127.0.0.1:{port}", self._key, USERS, habits, self.answers.append, time.time
        )

    def run(self, kills: Iterable[LiveKill]) -> Account:
        """Kill and kill again; then end the run, and return what became of its turns."""
        try:
            self._start()
            with talking(self.crowd):
                self._await_answers(ANSWERS)
                for kill in kills:
                    self._strike(kill)
                self._await_answers(ANSWERS)
            self._stop()
        finally:
            for start in self._starts:
                start.end()
        found = account(self.folder, self.answers)
        found.discrepancies += audited(self.folder)
        return found

    def _start(self) -> None:
        command = run_command("serve", str(self._recipe), "--resume")
        with (self._root / "output").open("a") as output:
            self._starts.append(RunProcess(command, output, environment=environment(**{KEY: self._key})))

    def _strike(self, kill: LiveKill) -> None:
        if kill.moment == "under load":
            self._await_answers(ANSWERS)
        time.sleep(kill.delay_s)
        victim, pids = kill.victim, list[int]()
        if "gateway" in victim:
            pids += self._gateways()
        if "driver" in victim:
            pids.append(self._driver.pid)
        self.hits[f"{victim}, {kill.moment}"] += 1
        answers = len(self.answers)
        self.say(f"kill {kill.number}: {victim}, {kill.moment} + {kill.delay_s:.1f} s, {answers} answers")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if "driver" in victim:
            self._driver.wait(END_S)
            self._start()

    def _stop(self) -> None:
        self._driver.send_signal(signal.SIGINT)
        try:
            self._driver.wait(END_S)
        except subprocess.TimeoutExpired:
            raise LiveSweepFailed(f"not ended in {END_S} s:\n{self._output()}") from None
        if gateways := self._gateways():
            raise LiveSweepFailed(f"the gateways {gateways} have outlived an orderly end")

    @property
    def _driver(self) -> RunProcess:
        return self._starts[-1]

    def _gateways(self) -> list[int]:
        """Return the gateways of the run: one that outlives its driver is nobody's child."""
        pids: list[int] = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                command = path.read_bytes()
                if (
                    b"slipstream.rollout.gateway.gateway_process" in command
                    and str(self.folder).encode() in command
                ):
                    pids.append(int(path.parent.name))
        return pids

    def _await_answers(self, number: int) -> None:
        expected, deadline = len(self.answers) + number, time.monotonic() + STARTED_S
        while len(self.answers) < expected:
            if self._driver.poll() is not None:
                raise LiveSweepFailed(f"the run has ended by itself:\n{self._output()}")
            if time.monotonic() > deadline:
                raise LiveSweepFailed(f"no {number} answers in {STARTED_S} s:\n{self._output()}")
            time.sleep(0.05)

    def _output(self) -> str:
        return (self._root / "output").read_text()[-4000:]


def recipe(root: Path, port: int, admin_port: int) -> dict[str, object]:
    """Return the recipe: a policy that is as small as one can be, without prompts."""
    return {
        "run": {"name": NAME, "root": str(root), "steps": 1_000_000},
        "model": {"path": str(write_chat_model(root / "model")), "dtype": "float32"},
        "actor": {"microbatch_tokens": 4096},
        "rollout": {
            "max_head_offpolicyness": 8,
            "batch_size": 4,
            "n_samples_per_prompt": 2,
            "max_concurrent": 32,
            "sampling": {"temperature": 1.0, "max_new_tokens": 24},
            "engine": {"restarts": 100, "args": {"max_running_requests": 32, "max_total_tokens": 32768}},
        },
        "gateway": {"port": port, "admin_port": admin_port},
        "live": {},
        "judge": {"type": "code", "code": "tests.crash.live_judge.Judge"},
        "checkpoint": {"every": 2, "keep_last": 2},
    }


def _words(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase + " ", k=rng.randrange(4, 24)))


class talking:
    """Lets users talk inside the block, in a thread of their own."""

    def __init__(self, crowd: Crowd) -> None:
        self._loop = asyncio.new_event_loop()
        self._talk = self._loop.create_task(crowd.talk())
        self._thread = threading.Thread(target=self._go, name="users")

    def _go(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._talk)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._talk.cancel)
        self._thread.join()
        self._loop.close()


# ---- the account


@dataclass(frozen=True)
class Recorded:
    """A turn as journal or ledger has it."""

    id: int
    session: int
    """Digest of the names of key and session."""
    sampled: int
    said: str | None
    """The last message of its request; None: its content is not needed any more, and is gone."""
    text: str | None


def audited(folder: Path) -> list[str]:
    """Return the discrepancies that ``slipstream audit`` finds in a run that has ended."""
    command = run_command("audit", str(folder), "--json")
    audit = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if not audit.stdout:
        raise LiveSweepFailed(f"audit: {audit.stderr}")
    return json.loads(audit.stdout)["discrepancies"]


def account(folder: Path, answers: Sequence[Answered]) -> Account:
    """Compare what users have got with what journal and ledger have. The run has ended."""
    found = Account(acknowledged=len(answers))
    journals, keys = journal_turns(folder, found)
    with closing(open_for_reading(folder / LEDGER)) as ledger:
        records = Records(ledger, folder)
        turns = ledger_turns(records, journals)
        twice(records, found)
    found.recorded = len(turns)
    turns += in_journal_only(journals, {turn.id for turn in turns})
    [key] = keys or {"none"}
    unmatched: dict[int, list[Recorded]] = defaultdict(list)
    for turn in turns:
        unmatched[turn.session].append(turn)
    # Turns whose content is known first: those without may stand for any answer of the same length.
    for answer in answers:
        session = session_of(named(key), named(answer.session))
        match = min(
            (turn for turn in unmatched[session] if _is_of(turn, answer)),
            key=lambda turn: turn.text is None,
            default=None,
        )
        if match is None:
            found.lost.append(f"{answer.session}: {answer.said!r} -> {answer.text!r}")
        else:
            unmatched[session].remove(match)
    same = Counter((t.session, t.said, t.text) for t in turns if t.text is not None and t.sampled >= TELLING)
    found.doubled = [f"{content}: {number} times" for content, number in same.items() if number > 1]
    return found


def _is_of(turn: Recorded, answer: Answered) -> bool:
    if turn.sampled != answer.tokens:
        return False
    return turn.text is None or (turn.said, turn.text) == (answer.said, answer.text)


def journal_turns(folder: Path, found: Account) -> tuple[dict[int, Turn], set[str]]:
    """Return the turns that the journal keeps, by their numbers in the ledger, and the names of their keys.

    It is a discrepancy if the ledger lacks any of its entries.
    """
    with closing(open_for_reading(folder / LEDGER)) as ledger:
        rows = ledger.execute("SELECT id, name, durable FROM gateways")
        gateways = {name: (id_, durable) for id_, name, durable in rows}
    kept: dict[int, Turn] = {}
    keys: set[str] = set()
    for path in folder.glob("gateway/gateway-*.sqlite"):
        with closing(JournalFile.open(path, path.stem)) as file:
            gateway, durable = gateways[file.stamp.identity]
            if durable != file.stamp.last:
                last = file.stamp.last
                found.discrepancies.append(f"{path.name} ends with entry {last}, the ledger with {durable}")
            number = 0
            while rows := file.rows(number):
                number = rows[-1].number
                for row in rows:
                    if isinstance(entry := row.entry(), Turn):
                        kept[turn_id(gateway, row.number)] = entry
                        keys.add(entry.key)
    return kept, keys


def ledger_turns(records: Records, journal: dict[int, Turn]) -> list[Recorded]:
    """Return all turns of the ledger, with what is still known of them, there or in the journal."""
    segments = Segments(records.folder / FOLDER, records.stamp.run)
    turns: list[Recorded] = []
    rows = records.connection.execute("SELECT id, session, sampled, gone, said FROM turns")
    for id_, session, sampled, gone, ref in rows:
        said = text = None
        if gone == KEPT and ref is not None:
            stored = decode_said(segments.read(*REF.unpack(ref)))
            said, text = _content(stored.messages, stored.answer)
        elif id_ in journal:
            said, text = _content(bytes(journal[id_].messages), bytes(journal[id_].answer))
        turns.append(Recorded(id_, session, sampled, said, text))
    segments.close()
    return turns


def in_journal_only(journal: dict[int, Turn], known: set[int]) -> list[Recorded]:
    """Return the turns that are in the journal and not among those ``known``."""
    return [
        Recorded(
            id_,
            session_of(named(turn.key), named(turn.session)),
            sum(tokens for _, tokens in turn.spans),
            *_content(bytes(turn.messages), bytes(turn.answer)),
        )
        for id_, turn in journal.items()
        if id_ not in known
    ]


def _content(messages: bytes, answer: bytes) -> tuple[str, str]:
    users = [message for message in json.loads(messages) if message["role"] == "user"]
    return (text_of(users[-1]) if users else ""), text_of(json.loads(answer))


def twice(records: Records, found: Account) -> None:
    """Note the turns that were trained more than once by the steps behind today's weights."""
    line = set(records.line)
    rows = records.connection.execute("SELECT version, group_id FROM trainings WHERE group_id < 0")
    times = Counter(id_ for version, id_ in rows if version in line)
    found.trained = len(times)
    found.trained_twice = [f"turn {id_}: {number} times" for id_, number in times.items() if number > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first kill: go on with a sweep")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.0f} s  {text}", flush=True)

    failure, found = None, Account()
    with tempfile.TemporaryDirectory(prefix="slipstream-live-crash-") as scratch:
        sweep = LiveSweep(Path(scratch), say)
        numbers = range(arguments.first, arguments.first + arguments.kills)
        try:
            found = sweep.run(LiveKill.draw(arguments.seed, number) for number in numbers)
        except LiveSweepFailed as error:
            failure = str(error)
            say(f"FAILED: {failure}")
    for what, turns in asdict(found).items():
        for turn in turns[:5] if isinstance(turns, list) else ():
            say(f"{what}: {turn}")
    print(
        json.dumps(
            {
                "kills": sum(sweep.hits.values()),
                "seed": arguments.seed,
                "first": arguments.first,
                "hits": dict(sweep.hits),
                "acknowledged": found.acknowledged,
                "recorded": found.recorded,
                "trained": found.trained,
                "lost": len(found.lost),
                "doubled": len(found.doubled),
                "trained_twice": len(found.trained_twice),
                "discrepancies": len(found.discrepancies),
                "sent_again": dict(sweep.crowd.failures),
                "failure": failure,
            }
        )
    )
    sys.exit(failure is not None or not found.is_clean)


if __name__ == "__main__":
    main()
