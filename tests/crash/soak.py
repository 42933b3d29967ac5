"""Hours of a simulated run and ten minutes of a real one: no process may hold more and more memory.

    python -m tests.crash.soak                  twelve minutes
    python -m tests.crash.soak --minutes 30     a longer real run

The real run is that of the quickstart, with so low a learning rate that its answers keep their lengths. The
memory of a process is what would be free if it ended (unique set size); processes of one kind are added up.
Growth is that of a line through all samples behind the first third, in which buffers reach their sizes. The
simulated run lasts three hours, of which two are watched. It is one process, in which the driver's and the
collector's own code works on models of everything else.

Prints a table and, as the last line, one JSON object: `mb`, `growth_mb_per_hour` and `growth_percent` (over
the time that was watched) by kind of process. Exit code 1 if a kind has grown by more than 5 % and 5 MB.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from slipstream.backend.monitor.tables import Columns, rows_table
from slipstream.backend.quickstart import prepare
from slipstream.backend.simulate.compare import Work
from slipstream.backend.simulate.gpu_split import layout_of
from slipstream.backend.simulate.inputs import recipe
from slipstream.backend.simulate.schedules import recipe_schedule
from slipstream.backend.simulate.world import World
from tests.crash.sweep import Sweep, processes
from tests.runs.conftest import start_run

SETTINGS = (
    "run.steps=1000000",
    "rollout.batch_size=16",
    "rollout.n_samples_per_prompt=8",
    "actor.optimizer.lr=1e-9",
    "checkpoint.every=20",
    "checkpoint.keep_last=2",
)
KINDS = ("driver", "collector", "judge", "trainer", "engine actor", "engine scheduler")

SAMPLE_S = 5.0
SIMULATED_S = 3 * 3600.0
ALLOWED_PERCENT, ALLOWED_MB = 5.0, 5.0


@dataclass(frozen=True)
class Growth:
    """The memory of one kind of process over a run."""

    kind: str
    mb: float
    """At the end, by the line through the samples."""
    mb_per_hour: float
    percent: float
    """Growth over the time that was watched."""
    has_grown: bool


class Memory:
    """Samples of the memory of several kinds of processes."""

    def __init__(self) -> None:
        self._samples: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def note(self, kind: str, seconds: float, mb: float) -> None:
        self._samples[kind].append((seconds, mb))

    def growths(self) -> list[Growth]:
        """Return the growth of each kind behind the first third of its samples."""
        return [self._growth(kind, samples[len(samples) // 3 :]) for kind, samples in self._samples.items()]

    @staticmethod
    def _growth(kind: str, samples: list[tuple[float, float]]) -> Growth:
        seconds_S, mb_S = np.array(samples).T
        slope, start = np.polynomial.Polynomial.fit(seconds_S, mb_S, 1).convert().coef[::-1]
        first, last = start + slope * seconds_S[0], start + slope * seconds_S[-1]
        percent = 100 * (last - first) / first
        has_grown = bool(percent > ALLOWED_PERCENT and last - first > ALLOWED_MB)
        return Growth(kind, float(last), float(slope * 3600), float(percent), has_grown)


def unique_mb(pids: Sequence[int]) -> float:
    """Return the memory that would be free if the processes ended."""
    total_kb = 0
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total_kb += sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return total_kb / 1024


def real(minutes: float) -> list[Growth]:
    """Watch a real run from its third step on."""
    memory = Memory()
    with tempfile.TemporaryDirectory(prefix="slipstream-soak-") as scratch:
        inputs = Path(scratch) / "inputs"
        prepare(
            inputs / "policy", inputs / "train.jsonl", inputs / "heldout.jsonl",
            say=lambda _: None, warm_start_steps=40,
        )  # fmt: skip
        life = start_run(inputs, Path(scratch), "soak", *SETTINGS)
        try:
            Sweep(inputs, Path(scratch), print).wait(life, 3, 300)
            began = time.monotonic()
            while (seconds := time.monotonic() - began) < minutes * 60:
                for kind in KINDS:
                    memory.note(kind, seconds, unique_mb(processes(life, kind)))
                if life.process.poll() is not None:
                    sys.exit(f"the run has ended by itself:\n{life.output()[-2000:]}")
                time.sleep(SAMPLE_S)
        finally:
            life.end()
    return memory.growths()


def simulated() -> list[Growth]:
    """Watch the process of a simulation."""
    trial = simulation(20).run()
    steps = int(20 * SIMULATED_S / trial.makespan_s) + 1
    memory, next_s = Memory(), 0.0

    def advanced(seconds: float) -> None:
        nonlocal next_s
        if seconds >= next_s:
            gc.collect()  # a simulation does not look for garbage itself
            memory.note("simulation", seconds, unique_mb([os.getpid()]))
            next_s = seconds + SIMULATED_S / 200

    simulation(steps).run(advanced)
    return memory.growths()


def simulation(steps: int) -> World:
    """Return a run of the quickstart with so many steps, on the simulator's models."""
    config = recipe("quickstart", [f"run.steps={steps}", "eval.every=0"])
    work = Work(config, seed=1)
    return World(config, recipe_schedule(config), layout_of(config), work.workload())


TABLE: Columns[Growth] = {
    "process": lambda growth: growth.kind,
    "MB": lambda growth: f"{growth.mb:.1f}",
    "MB per hour": lambda growth: f"{growth.mb_per_hour:+.1f}",
    "growth": lambda growth: f"{growth.percent:+.2f} %" + (" (too much)" if growth.has_grown else ""),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=partial(argparse.RawTextHelpFormatter, width=110)
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the real run")
    arguments = parser.parse_args()
    growths = [*simulated(), *real(arguments.minutes)]
    Console(width=100).print(rows_table("memory", growths, TABLE))
    print(
        json.dumps(
            {
                "mb": {growth.kind: round(growth.mb, 1) for growth in growths},
                "growth_mb_per_hour": {growth.kind: round(growth.mb_per_hour, 1) for growth in growths},
                "growth_percent": {growth.kind: round(growth.percent, 2) for growth in growths},
            }
        )
    )
    sys.exit(any(growth.has_grown for growth in growths))


if __name__ == "__main__":
    main()
