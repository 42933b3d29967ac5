"""Real runs that are harmed in every way we know, one case after the other: a finished run, or a refusal.

    python -m tests.crash.cases                       all cases, more than an hour on two cores
    python -m tests.crash.cases --only "kill driver"  the cases whose names begin like this
    python -m tests.crash.cases --after "kill judge, start"   those behind this one
    python -m tests.crash.cases --list

A run is killed in its middle and copied. Each case resumes a copy, or harms it first: kill -9 and SIGSTOP of
every kind of process at several moments, of two kinds at once, damage to every kind of file, a full disk,
full shared memory, two resumes at once, users' requests that are meant to end engines.
A case is good when the run finishes, by itself or after further resumes, with a clean audit, or when it is
refused with exit code 2 by a message that says what to do; and when no process, no shared memory and no
temporary folder is left. Prints a table and, as the last line, one JSON object: `cases`, `bad`,
`left_behind`, `recover_s` by kind. Exit code 1 if a case is bad.
"""

import argparse
import fcntl
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from slipstream.backend.quickstart import prepare
from slipstream.rollout.gateway.keys import add_key
from slipstream.rollout.system.temporary import PREFIX
from tests.chat_model import write_chat_model
from tests.crash.sweep import Ended, Kill, Sweep, SweepFailed, processes
from tests.ports import held_port
from tests.runs.conftest import LaunchedRun, run_command, start_run

SETTINGS = ("rollout.max_head_offpolicyness=2", "checkpoint.every=2", "checkpoint.keep_last=2")
STEPS = 6
"""Training steps of a case beyond those of the copied run."""
STOPPED_S = 40.0
RESUMES = 3
"""Starts that a harmed run may need."""
WAYS_OUT = ("restore", "anew", "delete", "remove", "set ", "wait", "make room", "check ", "give ")
"""Words of which a refusal must hold one: it says what to do."""

VICTIMS = (
    "driver",
    "collector",
    "judge",
    "engine scheduler",
    "engine detokenizer",
    "engine actor",
    "trainer",
    "raylet",
    "gcs",
)
MOMENTS = ("training", "commit", "weight update", "start")
PAIRS = (
    ("trainer", "collector"),
    ("engine scheduler", "judge"),
    ("trainer", "engine actor"),
    ("driver", "engine scheduler"),
)
"""Killed at once. Driver and gateway are killed together by tests.crash.live."""


def abandoned_folders() -> frozenset[str]:
    """Return the temporary folders of runs on this machine that no living process owns."""
    abandoned: set[str] = set()
    for path in Path("/tmp").glob(f"{PREFIX}*"):
        with suppress(OSError):  # it goes just now
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                abandoned.add(str(path))
            except BlockingIOError:
                """The owner lives."""
            finally:
                os.close(handle)
    return frozenset(abandoned)


class Bad(AssertionError):
    """A case that has not ended well."""


@dataclass(frozen=True)
class Case:
    kind: str
    name: str
    act: Callable[["Lab", str], float | None]
    """Does the harm to a copy of the run, given its name, and sees the run through to its end. Returns the
    seconds from the harm to the next training step; None where the run was refused."""


@dataclass
class Lab:
    """A folder with a killed run, in whose copies the cases are tried."""

    inputs: Path
    root: Path
    say: Callable[[str], None]
    trained: int = 0
    """Training steps of the copied run."""
    others: frozenset[str] = field(default_factory=abandoned_folders)
    """Abandoned temporary folders that were there before."""

    # ---- the run that every case begins with

    def prepare(self) -> None:
        """Run for some steps, and kill the run behind two checkpoints; keep a copy from before, too."""
        life = start_run(self.inputs, self.root, "template", "run.steps=1000", *SETTINGS)
        sweep = self._sweep(life)
        try:
            sweep.wait(life, 3, 300)
            self._copy_database(life.folder, self.root / "older")
            sweep.wait(life, 7, 300)
            self._wait_for_checkpoints(life, 2)
            life.process.kill()
            life.process.wait()
            self._wait_until_quiet(life)
        finally:
            life.end()
        self.trained = sweep.steps_logged(life)

    @staticmethod
    def _wait_for_checkpoints(life: LaunchedRun, count: int) -> None:
        """Wait for complete checkpoints, which are written behind the training: a damaged one has another."""
        deadline = time.monotonic() + 120
        while len(list(life.folder.glob("checkpoints/v*/checkpoint.json"))) < count:
            if life.process.poll() is not None or time.monotonic() > deadline:
                raise Bad(f"no {count} checkpoints:\n{life.output()[-2000:]}")
            time.sleep(0.1)

    def copy(self, name: str) -> Path:
        folder = self.root / name
        shutil.copytree(self.root / "template", folder, symlinks=True)
        return folder

    # ---- lives

    def start(self, name: str, *overrides: str) -> LaunchedRun:
        steps = f"run.steps={self.trained + STEPS}"
        return start_run(self.inputs, self.root, name, steps, *SETTINGS, *overrides, resume=True)

    def finish(self, name: str, life: LaunchedRun | None = None, *overrides: str) -> None:
        """See a run through to its end, with further resumes if it fails. Raises Bad."""
        for _ in range(RESUMES + 1):
            life = life or self.start(name, *overrides)
            try:
                code = life.process.wait(400)
            except subprocess.TimeoutExpired:
                raise Bad(f"not ended in 400 s:\n{life.output()[-2000:]}") from None
            finally:
                left = self._wait_until_quiet(life)
                life.end()
            if left:
                raise Bad(f"left behind: {left}")
            self.audit(name)
            if code == 0:
                return
            if code == 2:
                raise Bad(f"refused: {life.output()[-1500:]}")
            life = None
        raise Bad(f"not finished after {RESUMES} further resumes:\n{self._output(name)[-2000:]}")

    def audit(self, name: str) -> None:
        command = run_command("audit", str(self.root / name), "--json")
        result = subprocess.run(command, capture_output=True, text=True, timeout=180)
        if result.returncode != 0:
            raise Bad(f"audit: {result.stdout[-1500:]}{result.stderr[-500:]}")

    def resumed_or_refused(self, name: str) -> float | None:
        """Resume a damaged run: it finishes with a clean audit, or is refused with what to do."""
        began = time.monotonic()
        life = self.start(name)
        sweep = self._sweep(life)
        before = sweep.steps_logged(life)
        try:
            sweep.wait(life, before + 1, 300)
        except Ended:
            code, output = life.process.wait(), life.output()
            left = self._wait_until_quiet(life)
            life.end()
            if left:
                raise Bad(f"left behind: {left}") from None
            if code != 2 or "Traceback" in output:
                raise Bad(f"ended with code {code}:\n{output[-1500:]}") from None
            if not any(word in output.lower() for word in WAYS_OUT):
                raise Bad(f"a refusal without a way out:\n{output[-1500:]}") from None
            return None
        recovered = time.monotonic() - began
        self.finish(name, life)
        return recovered

    def struck(self, name: str, victims: Sequence[str], moment: str, number: signal.Signals) -> float:
        """Resume a run, harm kinds of processes at a moment, and see the run through."""
        life = self.start(name)
        sweep = self._sweep(life)
        try:
            self._await(sweep, life, moment)
            pids = [pid for victim in victims for pid in self._processes(life, victim)]
            steps, began = sweep.steps_logged(life), time.monotonic()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number is signal.SIGSTOP:
                time.sleep(STOPPED_S)
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
            for _ in range(RESUMES + 1):
                try:
                    sweep.wait(life, steps + 1, 400)
                    break
                except Ended:
                    if life.process.wait() == 0:
                        break
                    left = self._wait_until_quiet(life)
                    life.end()
                    if left:
                        raise Bad(f"left behind: {left}") from None
                    self.audit(name)
                    life = self.start(name)
            recovered = time.monotonic() - began
        except SweepFailed as error:
            raise Bad(str(error)[-2000:]) from None
        except BaseException:
            life.end()
            raise
        self.finish(name, life)
        return recovered

    # ----

    def _sweep(self, life: LaunchedRun) -> Sweep:
        sweep = Sweep(self.inputs, self.root, self.say)
        sweep.life = life
        return sweep

    def _await(self, sweep: Sweep, life: LaunchedRun, moment: str) -> None:
        delay_s = {"training": 0.5, "start": 4.0}.get(moment, 0.0)
        sweep.await_moment(life, Kill(0, "", "any time" if moment == "training" else moment, delay_s))

    def _processes(self, life: LaunchedRun, victim: str) -> list[int]:
        """Return the processes of a kind, as soon as there are any."""
        deadline = time.monotonic() + 180
        while life.process.poll() is None and time.monotonic() < deadline:
            if pids := processes(life, victim):
                return pids
            time.sleep(0.05)
        raise Bad(f"there is no {victim}")

    def _wait_until_quiet(self, life: LaunchedRun) -> list[str]:
        """Return what is left of a run some time after its end."""
        deadline = time.monotonic() + 60
        while (left := self._left(life)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _left(self, life: LaunchedRun) -> list[str]:
        return [
            *(f"process {pid}" for pid in life.descendants()),
            *(f"/dev/shm/{name}" for name in sorted(life.process.shared_memory())),
            *sorted(abandoned_folders() - self.others),
        ]

    def _output(self, name: str) -> str:
        return (self.root / f"{name}.out").read_text()

    @staticmethod
    def _copy_database(folder: Path, target: Path) -> None:
        target.mkdir()
        for file in folder.glob("ledger.sqlite*"):
            shutil.copy(file, target)


# ---- damage to files


def flip(path: Path, place: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)


def cut(path: Path, share: float = 0.5) -> None:
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))


def zero(path: Path, start: int, length: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(length))


def newest(folder: Path, pattern: str) -> Path:
    return sorted(folder.glob(pattern))[-1]


def log_of(folder: Path) -> Path:
    """Return SQLite's log; where a run has left none, one is made by recording something."""
    path = folder / "ledger.sqlite-wal"
    if not path.exists() or not path.stat().st_size:
        raise Bad("the killed run has left no log")
    return path


def checkpoint(folder: Path) -> Path:
    """Return the newest complete checkpoint; one that was being written is none."""
    return newest(folder, "checkpoints/v*/checkpoint.json").parent


def shard(folder: Path) -> Path:
    return max(checkpoint(folder).glob("*.distcp"), key=lambda path: path.stat().st_size)


Damage = Callable[[Path, Path], object]
"""Harms a run folder, given also the older copy of its database."""

DAMAGES: dict[str, Damage] = {
    "database: header zeroed": lambda run, _: zero(run / "ledger.sqlite", 0, 100),
    "database: a page zeroed": lambda run, _: zero(run / "ledger.sqlite", 8192, 4096),
    "database: cut in half": lambda run, _: cut(run / "ledger.sqlite"),
    "database: emptied": lambda run, _: (run / "ledger.sqlite").write_bytes(b""),
    "database: deleted": lambda run, _: (run / "ledger.sqlite").unlink(),
    "database: a bit flipped": lambda run, _: flip(run / "ledger.sqlite", 0.4),
    "database: garbage": lambda run, _: (run / "ledger.sqlite").write_bytes(b"garbage" * 1000),
    "database: older copy with its log": lambda run, older: restore(run, older, log=True),
    "database: older copy, no log": lambda run, older: restore(run, older, log=False),
    "database: a value changed": lambda run, _: change_value(run),
    "log: deleted": lambda run, _: log_of(run).unlink(),
    "log: cut in half": lambda run, _: cut(log_of(run)),
    "log: a bit flipped": lambda run, _: flip(log_of(run), 0.6),
    "log: older copy": lambda run, older: shutil.copy(older / "ledger.sqlite-wal", run),
    "segments: newest deleted": lambda run, _: newest(run, "payload/*").unlink(),
    "segments: newest cut": lambda run, _: cut(newest(run, "payload/*")),
    "segments: a bit flipped": lambda run, _: flip(newest(run, "payload/*")),
    "segments: bytes added": lambda run, _: append(newest(run, "payload/*")),
    "segments: all deleted": lambda run, _: shutil.rmtree(run / "payload"),
    "checkpoint: shard cut": lambda run, _: cut(shard(run)),
    "checkpoint: shard flipped": lambda run, _: flip(shard(run)),
    "checkpoint: shard deleted": lambda run, _: shard(run).unlink(),
    "checkpoint: manifest deleted": lambda run, _: (checkpoint(run) / "checkpoint.json").unlink(),
    "checkpoint: manifest emptied": lambda run, _: (checkpoint(run) / "checkpoint.json").write_text(""),
    "checkpoint: newest deleted": lambda run, _: shutil.rmtree(checkpoint(run)),
    "checkpoint: all deleted": lambda run, _: shutil.rmtree(run / "checkpoints"),
    "recipe: emptied": lambda run, _: (run / "recipe.yaml").write_text(""),
    "recipe: deleted": lambda run, _: (run / "recipe.yaml").unlink(),
    "recipe: garbage": lambda run, _: (run / "recipe.yaml").write_text("{[not yaml"),
    "inputs: garbage": lambda run, _: (run / "inputs.json").write_text("{"),
    "lease: garbage": lambda run, _: (run / "driver.json").write_text("{"),
    "lease: deleted": lambda run, _: (run / "driver.json").unlink(),
    "metrics: half a line": lambda run, _: append(run / "metrics.jsonl", b'{"step": '),
    "permissions: a folder that cannot be written": lambda run, _: (run / "payload").chmod(0o500),
}


def restore(run: Path, older: Path, *, log: bool) -> None:
    for file in run.glob("ledger.sqlite*"):
        file.unlink()
    for file in older.glob("ledger.sqlite*"):
        if log or file.name == "ledger.sqlite":
            shutil.copy(file, run)


def change_value(run: Path) -> None:
    connection = sqlite3.connect(run / "ledger.sqlite")
    with connection:
        connection.execute("UPDATE versions SET parent = parent - 1 WHERE version = 3")
    connection.close()


def append(path: Path, data: bytes = b"\0" * 10_000) -> None:
    with path.open("ab") as file:
        file.write(data)


# ---- cases


def struck(victims: Sequence[str], moment: str, number: signal.Signals) -> Callable[[Lab, str], float | None]:
    def act(lab: Lab, name: str) -> float:
        lab.copy(name)
        return lab.struck(name, victims, moment, number)

    return act


def full_shared_memory(moment: str) -> Callable[[Lab, str], float | None]:
    """The run's /dev/shm is full at a moment, and stays so for some time; then there is room again."""

    def act(lab: Lab, name: str) -> float | None:
        lab.copy(name)
        life = lab.start(name)
        sweep = lab._sweep(life)
        lab._await(sweep, life, moment)
        shared = life.process.shared_memory_folder
        status = os.statvfs(shared)
        used = (status.f_blocks - status.f_bfree) * status.f_frsize
        remount(life, max(used, status.f_frsize))
        try:
            code = life.process.wait(STOPPED_S)
        except subprocess.TimeoutExpired:  # nobody has written to it
            remount(life, 2**30)
            lab.finish(name, life)
            return None
        left, output = lab._wait_until_quiet(life), life.output()  # the guard speaks after the run's end
        life.end()
        if left:
            raise Bad(f"left behind: {left}")
        if code and "/dev/shm" not in output:
            raise Bad(f"shared memory is full, code {code}, and nothing says so:\n{output[-1500:]}")
        lab.audit(name)
        lab.finish(name)
        return None

    return act


def remount(life: LaunchedRun, size: int) -> None:
    """Give the run's own /dev/shm another size."""
    enter = ["nsenter", "--target", str(life.process.pid), "--mount"]
    subprocess.run([*enter, "mount", "-o", f"remount,size={size}", "/dev/shm"], check=True)


POISONS: dict[str, dict[str, object]] = {
    "biases that leave no token": {"logit_bias": {str(token): -1e39 for token in range(64)}},
    "a temperature below float32": {"temperature": 1e-320},
    "a regex that compiles for seconds": {"regex": "".join(f"(0{n}|1[0-9]+2)" for n in range(480))},
    "repetitions in each other": {"regex": r"((((\w)*?){0,1000})+){1000}"},
    "a grammar without a text": {"ebnf": 'root ::= "1" a\na ::= "2" a'},
    "a schema that cannot be spelled": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": "海"}}}
    },
    "a schema without an end": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#"}}}
    },
    "no end token for long": {"min_tokens": 60, "stop_token_ids": list(range(60)), "ignore_eos": True},
}
"""Requests that SGLang computes wrongly with, or for too long."""


def poisoned(poison: dict[str, object]) -> Callable[[Lab, str], float | None]:
    """A user sends a poison through several weight updates, beside one who asks what anybody asks."""

    def act(lab: Lab, name: str) -> float | None:
        port = held_port()
        model = write_chat_model(lab.root / f"{name} model")  # one that can spell grammars
        life = start_run(
            *(lab.inputs, lab.root, name, "run.steps=12", *SETTINGS, f"model.path={model}"),
            *(f"gateway.port={port}", f"gateway.admin_port={held_port()}"),
        )
        keys = [add_key(lab.root / f"{name}.keys.json", user) for user in ("anna", "bert")]
        hostile, other = (
            httpx.Client(
                base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"Bearer {key}"}, timeout=60
            )
            for key in keys
        )
        sweep = lab._sweep(life)
        sweep.wait(life, 2, 300)
        engines, statuses = processes(life, "engine scheduler"), Counter[tuple[str, int]]()
        body = {"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 64}
        for _ in range(6):
            steps = sweep.steps_logged(life)
            for user, client, changes in (("hostile", hostile, poison), ("other", other, {})):
                with suppress(httpx.TransportError):  # the run has ended
                    reply = client.post("/v1/chat/completions", json=body | changes)
                    statuses[user, reply.status_code] += 1
            with suppress(Ended):
                sweep.wait(life, steps + 1, 300)
        lost = set(engines) - set(processes(life, "engine scheduler")) if life.process.poll() is None else ()
        lab.say(f"  {dict(statuses)}")
        if len(lost) > 1:
            life.end()
            raise Bad(f"{len(lost)} engines were lost")
        if any(status >= 500 or (user == "other" and status != 200) for user, status in statuses):
            life.end()
            raise Bad(f"replies: {statuses}")
        lab.finish(name, life)
        return None

    return act


def damaged(damage: Damage) -> Callable[[Lab, str], float | None]:
    def act(lab: Lab, name: str) -> float | None:
        damage(lab.copy(name), lab.root / "older")
        return lab.resumed_or_refused(name)

    return act


def two_resumes(lab: Lab, name: str) -> float | None:
    """Two processes take the run over at once: one runs it, the other is refused."""
    lab.copy(name)
    lives = [lab.start(name), lab.start(name)]
    deadline = time.monotonic() + 120
    while all(life.process.poll() is None for life in lives) and time.monotonic() < deadline:
        time.sleep(0.1)
    ended = [life for life in lives if life.process.poll() is not None]
    if len(ended) != 1 or ended[0].process.wait() != 2:
        for life in lives:
            life.end()
        raise Bad(f"{len(ended)} of two resumes have ended:\n{lives[0].output()[-1500:]}")
    ended[0].end()
    [going_on] = [life for life in lives if life is not ended[0]]
    lab.finish(name, going_on)
    return None


def full_disk(lab: Lab, name: str) -> float | None:
    """The file system of the run folder is full; then room is made."""
    folder = lab.copy(name)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    aside = folder.with_name(f"{name}.aside")
    folder.rename(aside)
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size + 3_000_000}", "tmpfs", str(folder)], check=True
    )
    try:
        shutil.copytree(aside, folder, dirs_exist_ok=True)
        life = lab.start(name)
        code = life.process.wait(400)
        output, left = life.output(), lab._wait_until_quiet(life)
        life.end()
        if left:
            raise Bad(f"left behind: {left}")
        if "Traceback" in output or (code and not any(word in output.lower() for word in WAYS_OUT)):
            raise Bad(f"a full disk, code {code}:\n{output[-1500:]}")
        subprocess.run(["mount", "-o", "remount,size=200M", str(folder)], check=True)
        lab.finish(name)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
    return None


def killed_in_export(lab: Lab, name: str) -> float | None:
    """kill -9 of the driver while the trained policy is written."""
    lab.copy(name)
    life = lab.start(name)
    deadline = time.monotonic() + 400
    while "writing the trained policy" not in lab._output(name) and time.monotonic() < deadline:
        if life.process.poll() is not None:
            break
        time.sleep(0.005)
    life.process.kill()
    life.process.wait()
    left = lab._wait_until_quiet(life)
    life.end()
    if left:
        raise Bad(f"left behind: {left}")
    lab.audit(name)
    lab.finish(name)
    return None


def tensor_rank(lab: Lab, name: str) -> float | None:
    """kill -9 of one of two tensor-parallel ranks: both are started again, and no engine is."""
    life = start_run(lab.inputs, lab.root, name, "run.steps=8", *SETTINGS, "actor.parallel.tensor=2")
    sweep = lab._sweep(life)
    sweep.wait(life, 5, 400)
    engines, steps, began = processes(life, "engine"), sweep.steps_logged(life), time.monotonic()
    os.kill(processes(life, "trainer")[-1], signal.SIGKILL)
    sweep.wait(life, steps + 1, 400)
    recovered = time.monotonic() - began
    if processes(life, "engine") != engines:
        life.end()
        raise Bad("the engines were started again with the trainer")
    if life.process.wait(400) != 0:
        raise Bad(life.output()[-1500:])
    left = lab._wait_until_quiet(life)
    life.end()
    if left:
        raise Bad(f"left behind: {left}")
    lab.audit(name)
    return recovered


def cases() -> Iterator[Case]:
    for victim in VICTIMS:
        for moment in MOMENTS:
            yield Case(f"kill {victim}", f"kill {victim}, {moment}", struck([victim], moment, signal.SIGKILL))
        yield Case(f"stop {victim}", f"stop {victim} for 40 s", struck([victim], "training", signal.SIGSTOP))
    yield Case("kill trainer", "kill one of two tensor ranks", tensor_rank)
    yield Case("kill driver", "kill driver, export", killed_in_export)
    yield Case("two resumes", "two resumes at once", two_resumes)
    yield Case("full disk", "full disk", full_disk)
    for pair in PAIRS:
        yield Case("two at once", f"kill {' and '.join(pair)}", struck(pair, "training", signal.SIGKILL))
    for moment in ("start", "training", "weight update"):
        yield Case("full shared memory", f"full /dev/shm, {moment}", full_shared_memory(moment))
    for name, poison in POISONS.items():
        yield Case("poison", f"poison: {name}", poisoned(poison))
    for name, damage in DAMAGES.items():
        yield Case(f"damage {name.partition(':')[0]}", f"damage {name}", damaged(damage))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="beginning of the names of the cases to try")
    parser.add_argument("--after", default="", help="go on behind the case of this name")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    parser.add_argument("--seed", type=int, help="try the cases in a random order")
    arguments = parser.parse_args()
    chosen = [case for case in cases() if case.name.startswith(arguments.only)]
    names = [case.name for case in chosen]
    if arguments.after:
        if arguments.after not in names:
            parser.error(f"--after {arguments.after!r}: no such case; --list prints their names")
        chosen = chosen[names.index(arguments.after) + 1 :]
    if arguments.list:
        print("\n".join(case.name for case in chosen))
        return
    if arguments.seed is not None:
        random.Random(arguments.seed).shuffle(chosen)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.0f} s  {text}", flush=True)

    bad: dict[str, str] = {}
    recovered: dict[str, list[float]] = defaultdict(list)
    refused: list[str] = []
    with tempfile.TemporaryDirectory(prefix="slipstream-cases-") as scratch:
        inputs = Path(scratch) / "inputs"
        prepare(
            inputs / "policy", inputs / "train.jsonl", inputs / "heldout.jsonl", say=say, warm_start_steps=40
        )
        lab = Lab(inputs, Path(scratch), say)
        lab.prepare()
        for number, case in enumerate(chosen):
            name = f"case-{number:03}"
            try:
                seconds = case.act(lab, name)
            except (Bad, SweepFailed, Ended, subprocess.TimeoutExpired) as error:
                bad[case.name] = f"{type(error).__name__}: {error}"
                say(f"BAD   {case.name}: {bad[case.name]}")
                continue
            if seconds is None:
                refused.append(case.name)
                say(f"good  {case.name}")
            else:
                recovered[case.kind].append(seconds)
                say(f"good  {case.name}: {seconds:.1f} s to the next step")
            shutil.rmtree(Path(scratch) / name, ignore_errors=True)
    print(
        json.dumps(
            {
                "cases": len(chosen),
                "bad": sorted(bad),
                "left_behind": sorted(name for name, text in bad.items() if "left behind" in text),
                "recover_s": {kind: round(max(times), 1) for kind, times in sorted(recovered.items())},
                "without_a_further_step": len(refused),
            }
        )
    )
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
