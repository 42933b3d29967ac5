"""Learning from use: users talk to the served quickstart policy, which learns from what they say next alone.

    python -m benchmarks.live_learning [--seeds 0 1 2]

`slipstream serve` serves and trains, without any prompt set. Users send problems, and say `thanks` or `wrong`
of the answers; `RuleJudge` makes a score of 1 or -1 of that. Held-out problems, which no user asks, are asked
at temperature 0 before and after the training steps, through the same gateway. `gains` are percentage points,
and `shuffled` those of runs in which the users exchange their words at random.

Each seed has a policy, problems and held-out problems of its own.
"""

import asyncio
import json
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sized
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness import parser
from benchmarks.quickstart_users import POLL_S, Conversations, Shuffle, Users, honestly
from slipstream.backend.commands.audit import audit_run
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.backend.quickstart.task import held_out_set, train_problems
from slipstream.rollout.system.linux import PR_SET_PDEATHSIG, prctl
from slipstream.rollout.system.network import hold_port, port_of

USERS = 64
"""Users that talk at the same time."""

HELD_OUT = 300
"""Held-out problems: the standard error of an accuracy is at most 2.9 percentage points."""

BATCH, STEPS = 64, 48
"""Turns of a training step, and training steps."""

START_TIMEOUT_S, STEPS_TIMEOUT_S, END_TIMEOUT_S = 1800, 1800, 120

SETTINGS = (f"rollout.batch_size={BATCH}", "live={}", "checkpoint.every=1000")
"""Settings that differ from those of the quickstart."""


@dataclass(frozen=True)
class Outcome:
    """What a policy has learned from its users."""

    seed: int
    shuffled: bool
    before: float
    after: float
    """Share of the held-out problems that are answered right."""
    seconds: float
    """Duration of the training steps."""
    answers: int
    """Number of answers that users got meanwhile."""
    trained: int
    """Number of turns that were trained."""
    max_lag: int
    discrepancies: int
    """Number of discrepancies that the audit has found."""

    @property
    def gain(self) -> float:
        """In percentage points."""
        return round(100 * (self.after - self.before), 1)


class Served:
    """`slipstream serve` as a process."""

    def __init__(self, root: Path, name: str, *settings: str) -> None:
        """``root``: folder of the run folder ``name``."""
        self.folder = root / name
        self._out = root / f"{name}.out"
        self.key = secrets.token_hex(16)
        self._ports = [hold_port("127.0.0.1"), hold_port("127.0.0.1")]
        port, admin_port = map(port_of, self._ports)
        self.url = f"http://127.0.0.1:{port}"
        command = [
            *(sys.executable, "-m", "slipstream.backend.cli", "serve", "quickstart"),
            *(f"run.root={root}", f"run.name={name}"),
            *(f"gateway.port={port}", f"gateway.admin_port={admin_port}"),
            *settings,
        ]
        with self._out.open("w") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"SGLANG_API_KEY": self.key},
                preexec_fn=partial(prctl, PR_SET_PDEATHSIG, signal.SIGTERM),  # it ends with the benchmark
            )

    @asynccontextmanager
    async def conversations(self) -> AsyncIterator[Conversations]:
        """Give a way to talk to the policy, once it is served."""
        conversations = Conversations(self.url, self.key)
        try:
            ready = asyncio.ensure_future(conversations.ready(START_TIMEOUT_S))
            while not ready.done():
                self.check()
                await asyncio.wait({ready}, timeout=POLL_S)
            await ready
            yield conversations
        finally:
            await conversations.close()

    def last_step(self) -> dict[str, float]:
        """Return the metrics of the last training step that is done; none, if there is none yet."""
        with suppress(OSError):
            for line in reversed((self.folder / "metrics.jsonl").read_text().splitlines(keepends=True)):
                if line.endswith("\n") and "train/step" in (metrics := json.loads(line)):
                    return metrics
        return {}

    async def trained(self, steps: int) -> None:
        """Wait until so many training steps are done. Raises TimeoutError."""
        async with asyncio.timeout(STEPS_TIMEOUT_S):
            while self.last_step().get("train/step", 0) < steps:
                self.check()
                await asyncio.sleep(POLL_S)

    def check(self) -> None:
        """Raise RuntimeError if the process has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"slipstream serve has ended:\n{self._out.read_text()[-4000:]}")

    def end(self) -> None:
        """End the process, with everything that it has started."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_TIMEOUT_S)
        finally:
            self._process.kill()
            for port in self._ports:
                port.close()


async def learn(root: Path, seed: int, *, shuffled: bool) -> Outcome:
    """Serve the policy of a seed to users until it has learned from them for ``STEPS`` steps."""
    problems = train_problems(random.Random(f"users-{seed}"))
    shuffle = Shuffle(random.Random(f"words-{seed}"), USERS // 2)

    def talking(conversations: Conversations) -> AbstractAsyncContextManager[Sized]:
        return Users(conversations, problems, USERS, shuffle.exchange if shuffled else honestly).talking()

    return await learned(serve(root, f"seed-{seed}{'-shuffled' * shuffled}", seed), seed, shuffled, talking)


def serve(root: Path, name: str, seed: int, *settings: str) -> Served:
    """Serve the start policy of a seed, which learns for ``STEPS`` steps. ``settings``: further ones."""
    policy = root / ".inputs" / f"policy-{seed}"  # what `prepare` makes lies in a hidden folder
    return Served(
        root, name, *SETTINGS, f"run.seed={seed}", f"run.steps={STEPS}", f"model.path={policy}", *settings
    )


async def learned(
    served: Served,
    seed: int,
    shuffled: bool,
    talking: Callable[[Conversations], AbstractAsyncContextManager[Sized]],
) -> Outcome:
    """Return what a served policy learns, and end it.

    ``talking``: users talk inside of the block, which gives their answers.
    """
    held_out = held_out_set(seed, HELD_OUT)
    try:
        async with served.conversations() as conversations:
            before = await conversations.accuracy(held_out, USERS)
            began = time.monotonic()
            async with talking(conversations) as answers:
                await served.trained(STEPS)
            seconds = time.monotonic() - began
            after = await conversations.accuracy(held_out, USERS)
    finally:
        served.end()
    audit = await asyncio.to_thread(audit_run, served.folder, print)
    return Outcome(
        seed,
        shuffled,
        before,
        after,
        seconds,
        len(answers),
        audit.turns["trained"],
        audit.max_head_lag or 0,
        len(audit.discrepancies),
    )


TABLE: Columns[Outcome] = {
    "seed": lambda row: row.seed,
    "words": lambda row: "shuffled" if row.shuffled else "true",
    "before": lambda row: f"{row.before:.1%}",
    "after": lambda row: f"{row.after:.1%}",
    "gain, points": lambda row: f"{row.gain:+.1f}",
    "turns trained": lambda row: f"{row.trained:,}",
    "largest lag": lambda row: row.max_lag,
    "seconds": lambda row: f"{row.seconds:.0f}",
    "answers/s": lambda row: f"{row.answers / row.seconds:.0f}",
    "audit": lambda row: "clean" if not row.discrepancies else f"{row.discrepancies} discrepancies",
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = options.parse_args().seeds
    with tempfile.TemporaryDirectory(prefix="slipstream-live-learning-") as root:
        outcomes = [
            asyncio.run(learn(Path(root), seed, shuffled=shuffled))
            for shuffled in (False, True)
            for seed in seeds
        ]
    table_console().print(rows_table("what users say of answers", outcomes, TABLE, left=["words"]))
    print(
        json.dumps(
            {
                "gains": [row.gain for row in outcomes if not row.shuffled],
                "shuffled": [row.gain for row in outcomes if row.shuffled],
                "before": [round(row.before, 3) for row in outcomes],
                "seconds": round(statistics.mean(row.seconds for row in outcomes), 1),
                "discrepancies": sum(row.discrepancies for row in outcomes),
            }
        )
    )


if __name__ == "__main__":
    main()
