"""kill -9 of any process of real runs at seeded instants; after each, audit and resume.

    python -m tests.crash.sweep --kills 200 --seed 1
    python -m tests.crash.sweep --kills 1 --seed 1 --first 57      only that one again

One run after the other is started, killed, audited and resumed until it is done. The instants are seeded,
and some are aimed: at a weight update, at a checkpoint being written, at its commit. A run goes on by itself
when its trainer, an engine, a collector or a judge is killed. Prints a line per kill and, as the last line,
one JSON object.
Exit code 1 if an audit was not clean or a run could not go on or finish.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.backend.quickstart import prepare
from tests.runs.conftest import LaunchedRun, run_command, start_run

STEPS = 40
BOUND = 2
"""Largest head lag. BOUND + 1 batches may be ready already when something is killed."""
START_TIMEOUT_S = 180
"""From a start to the first training step on a busy machine."""
END_TIMEOUT_S = 300
"""To the end of a run that was left alone, or whose trainer was killed."""
QUIET_TIMEOUT_S = 60
"""From the driver's end to that of the last process of the run."""

VICTIMS = {"driver": 4, "trainer": 3, "engine": 3, "collector": 3, "judge": 2}
REPLACED = ("trainer", "engine", "collector", "judge")
"""Victims that a run replaces while it goes on."""
MOMENTS = {"any time": 3, "start": 4, "weight update": 2, "checkpoint": 2, "commit": 2}


class SweepFailed(AssertionError):
    """Something has happened that must never happen. The message names the kill."""


@dataclass
class Kill:
    """One act of violence, drawn from (seed, number)."""

    number: int
    victim: str
    moment: str
    delay_s: float

    @classmethod
    def draw(cls, seed: int, number: int) -> "Kill":
        rng = random.Random(f"{seed}:{number}")
        victim = rng.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        moment = rng.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        longest = {"any time": 6.0, "start": 12.0, "weight update": 0.1, "checkpoint": 1.5, "commit": 0.02}
        return cls(number, victim, moment, rng.uniform(0, longest[moment]))


@dataclass
class Sweep:
    inputs: Path
    folder: Path
    say: Callable[[str], None]
    overrides: tuple[str, ...] = ()
    steps: int = STEPS
    """Training steps of a run."""
    hits: Counter = field(default_factory=Counter)
    run_number: int = 0
    finished: int = 0
    resumes: int = 0
    life: LaunchedRun = field(init=False)
    """The present one."""
    recoveries_s: list[float] = field(default_factory=list)
    """From a resume's start to its first training step."""

    def run(self, kills: Iterable[Kill]) -> None:
        """One kill after the other; then the last run is left to finish."""
        try:
            life = self.start()
            for kill in kills:
                life = self.until_killed(life, kill)
            self.settle(life, None)
        finally:
            self.life.end()
        self.say(f"run {self.run_number - 1} finished after the last kill")

    # ---- lives

    def start(self) -> LaunchedRun:
        """Resume the present run, or begin the next one."""
        folder = self.folder / f"run-{self.run_number}"
        if (folder / "ledger.sqlite").exists():
            self.resumes += 1
        self.life = start_run(
            self.inputs,
            self.folder,
            f"run-{self.run_number}",
            f"run.steps={self.steps}",
            f"rollout.max_head_offpolicyness={BOUND}",
            "checkpoint.every=2",
            *self.overrides,
            resume=True,
        )
        return self.life

    def until_killed(self, life: LaunchedRun, kill: Kill) -> LaunchedRun:
        """Strike once; the next life."""
        while (victim := self.strike(life, kill)) is None:
            self.settle(life, None)
            life = self.start()
        self.hits[f"{victim}, {kill.moment}"] += 1
        if victim in REPLACED:
            self.go_on(life, kill)
        self.settle(life, kill)
        return self.start()

    def strike(self, life: LaunchedRun, kill: Kill) -> str | None:
        """Wait for the moment and kill; return what was killed, or None if the run was done before."""
        try:
            self.await_moment(life, kill)
        except Ended:
            return None
        victim, pids = kill.victim, processes(life, kill.victim)
        if not pids:  # not yet there at this moment of a start
            victim, pids = "driver", processes(life, "driver")
        self.say(f"kill {kill.number}: {victim}, {kill.moment} + {kill.delay_s:.2f} s")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return victim

    def go_on(self, life: LaunchedRun, kill: Kill) -> None:
        """Wait until the run has replaced what was killed; then stop it, to be audited."""
        try:
            self.wait(life, self.steps_logged(life) + BOUND + 2, START_TIMEOUT_S)
        except Ended:
            # A run whose trainer, engine or judge is lost while it starts may also end, and is resumed.
            if kill.moment != "start" and life.process.wait():
                raise SweepFailed(f"after {kill} {life.folder} has not gone on:\n{life.output()}") from None
        else:
            life.process.send_signal(signal.SIGINT)

    def await_moment(self, life: LaunchedRun, kill: Kill) -> None:
        if kill.moment != "start":
            began, resumed = time.monotonic(), (life.folder / "checkpoints").exists()
            self.wait(life, self.steps_logged(life) + 1, START_TIMEOUT_S)
            if resumed:
                self.recoveries_s.append(time.monotonic() - began)
        watched = {
            "weight update": lambda: _grown(life.folder / "logs" / "engine-0.log", "/pause_generation"),
            "checkpoint": lambda: lambda: _there(life.folder, "checkpoints/*.partial"),
            "commit": lambda: lambda: _there(life.folder, "checkpoints/*.partial/checkpoint.json*"),
        }.get(kill.moment)
        if watched is not None:
            seen, deadline = watched(), time.monotonic() + 20
            while not seen() and time.monotonic() < deadline:
                self.check_alive(life)
                time.sleep(0.001)
        until = time.monotonic() + kill.delay_s
        while time.monotonic() < until:
            self.check_alive(life)
            time.sleep(min(0.05, max(0.0, until - time.monotonic())))

    def check_alive(self, life: LaunchedRun) -> None:
        if life.process.poll() is not None:
            raise Ended

    def steps_logged(self, life: LaunchedRun) -> int:
        with suppress(FileNotFoundError):
            return (life.folder / "metrics.jsonl").read_text().count('"reward/mean"')
        return 0

    def wait(self, life: LaunchedRun, steps: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.steps_logged(life) < steps:
            self.check_alive(life)
            if time.monotonic() > deadline:
                raise SweepFailed(f"no step in {timeout_s} s:\n{life.output()}")
            time.sleep(0.05)

    def settle(self, life: LaunchedRun, kill: Kill | None) -> None:
        """Wait until the life has ended and nothing is left of it; audit the run."""
        try:
            code = life.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise SweepFailed(f"{life.folder} has not ended in {END_TIMEOUT_S} s:\n{life.output()}") from None
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        while left := life.descendants():
            if time.monotonic() > deadline:
                commands = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80] for pid in left]
                raise SweepFailed(f"{QUIET_TIMEOUT_S} s after its end {life.folder} has left {commands}")
            time.sleep(0.05)
        life.end()
        self.audit(life, kill)
        if code == 0:
            trained = json.loads((life.folder / "summary.json").read_text())["groups"]["trained"]
            if trained != self.steps * 4:
                raise SweepFailed(f"{life.folder} has trained {trained} groups instead of {self.steps * 4}")
            self.finished += 1
            self.run_number += 1
        elif kill is None:
            raise SweepFailed(f"{life.folder} has ended with code {code} by itself:\n{life.output()}")

    def audit(self, life: LaunchedRun, kill: Kill | None) -> None:
        if not (life.folder / "ledger.sqlite").exists():
            return
        result = subprocess.run(
            run_command("audit", str(life.folder), "--json"), capture_output=True, text=True, timeout=120
        )
        if result.returncode != 0:
            raise SweepFailed(f"after {kill}: {result.stdout}{result.stderr}")


class Ended(Exception):
    """The life has ended by itself."""


COMMANDS = {
    "collector": "ray::CollectorActor",
    "engine": "slipstream.rollout.engine.launch",
    "engine actor": "ray::EngineActor",
    "engine scheduler": "sglang::scheduler",
    "engine detokenizer": "sglang::detokenizer",
    "trainer": "ray::TrainerActor",
    "raylet": "raylet/raylet",
    "gcs": "gcs_server",
    "gateway": "slipstream.rollout.gateway.gateway_process",
}
"""Part of the command line of each kind of process."""


def processes(life: LaunchedRun, kind: str) -> list[int]:
    """Return the processes of a kind: a key of ``COMMANDS``, "driver" or "judge"."""
    if kind == "driver":
        return [life.process.pid]
    return life.judges() if kind == "judge" else life.pids_of(COMMANDS[kind])


def _there(folder: Path, pattern: str) -> bool:
    with suppress(FileNotFoundError):  # renamed while it was looked into
        return any(folder.glob(pattern))
    return False


def _grown(log: Path, text: str) -> Callable[[], bool]:
    """True if ``text`` was written to a log since now."""
    start = log.stat().st_size if log.exists() else 0

    def seen() -> bool:
        if not log.exists():
            return False
        with log.open("rb") as file:
            file.seek(start)
            return text.encode() in file.read()

    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first kill: go on with a sweep")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.0f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="slipstream-crash-") as scratch:
        inputs = Path(scratch) / "inputs"
        prepare(
            inputs / "policy", inputs / "train.jsonl", inputs / "heldout.jsonl", say=say, warm_start_steps=40
        )
        sweep = Sweep(inputs, Path(scratch), say)
        failure = None
        try:
            numbers = range(arguments.first, arguments.first + arguments.kills)
            sweep.run(Kill.draw(arguments.seed, number) for number in numbers)
        except SweepFailed as error:
            failure = str(error)
            say(f"FAILED: {failure}")
    recoveries = sorted(sweep.recoveries_s)
    print(
        json.dumps(
            {
                "kills": sum(sweep.hits.values()),
                "seed": arguments.seed,
                "resumes": sweep.resumes,
                "runs_finished": sweep.finished,
                "hits": dict(sweep.hits),
                "median_s_to_first_step": recoveries[len(recoveries) // 2] if recoveries else None,
                "clean": failure is None,
                "failure": failure,
            }
        )
    )
    sys.exit(failure is not None)


if __name__ == "__main__":
    main()
