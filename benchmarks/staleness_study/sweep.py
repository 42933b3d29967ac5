"""Does the runs that the results lack, in worker processes. This process alone writes the results.

A sweep may be stopped at any time: the next one does what is missing then.
"""

import fcntl
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.staleness_study.study import WARM_START_STEPS, Inputs, Run, Setting, inputs_of, warm_path
from benchmarks.staleness_study.workers import completed

Key = tuple[str, str, int, int]
"""Setting, method, eta and seed of a run."""
Plan = Sequence[tuple[Setting, Sequence[tuple[str, int]]]]
"""Settings with their cells (method, eta), the most important first."""


class ResultsInUse(RuntimeError):
    """Another process writes the results."""


@dataclass(frozen=True)
class Job:
    """A run that is to be done."""

    setting: Setting
    method: str
    eta: int
    seed: int

    @property
    def key(self) -> Key:
        return self.setting.name, self.method, self.eta, self.seed

    def __str__(self) -> str:
        return f"{self.setting.name} {self.method} eta {self.eta} seed {self.seed}"


def jobs_of(plan: Plan, seeds: Sequence[int]) -> list[Job]:
    """Return the runs of a plan in its order. A cell that it names again has no further runs."""
    jobs = (
        Job(setting, method, eta, seed) for setting, cells in plan for method, eta in cells for seed in seeds
    )
    return list({job.key: job for job in jobs}.values())


def sweep(
    plan: Plan,
    seeds: Sequence[int],
    results: Path,
    folder: Path,
    say: Callable[[str], None],
    *,
    workers: int,
    warm_steps: int = WARM_START_STEPS,
) -> None:
    """Do the runs that ``results`` lacks, and append a line for each of them.

    ``folder`` keeps the warm-started policies. Raises WorkerFailed, and ResultsInUse.
    """
    with _opened(results) as file:
        done = read_results(results)
        missing = [job for job in jobs_of(plan, seeds) if job.key not in done]
        say(f"{len(missing)} runs to do, with {workers} workers")
        cold = [seed for seed in seeds if not warm_path(folder, seed, warm_steps).exists()]
        for seed, _ in completed(partial(_warm, folder, warm_steps), cold if missing else [], workers):
            say(f"seed {seed} has a policy")
        started, seconds = time.monotonic(), 0.0
        runs = completed(partial(_record, folder, warm_steps), missing, workers)
        for number, (job, record) in enumerate(runs, 1):
            file.write(json.dumps(record) + "\n")
            file.flush()
            seconds += record["cpu_s"]
            left = (time.monotonic() - started) / number * (len(missing) - number)
            say(
                f"{number}/{len(missing)} {job}: {record['accuracy'][-1][1]:.3f} "
                f"({seconds / number:.1f} s of CPU per run, {left / 60:.0f} min left)"
            )


def _warm(folder: Path, warm_steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    inputs_of(seed, folder, warm_steps=warm_steps, held_out=0)


def _record(folder: Path, warm_steps: int, job: Job) -> dict[str, Any]:
    # With one thread, no run waits for a busy core.
    torch.set_num_threads(1)
    return Run(
        job.setting, job.method, job.eta, _inputs(job.seed, folder, warm_steps, job.setting.held_out)
    ).result()


@cache
def _inputs(seed: int, folder: Path, warm_steps: int, held_out: int) -> Inputs:
    return inputs_of(seed, folder, warm_steps=warm_steps, held_out=held_out)


@contextmanager
def _opened(results: Path) -> Iterator[IO[str]]:
    """Open the results to append to them, after a line that a kill has cut short."""
    with results.open("a+b") as raw:
        try:
            fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultsInUse(f"another sweep is writing {results}; wait for its end, or end it") from None
        if raw.seek(0, 2) and raw.seek(-1, 2) >= 0 and raw.read() != b"\n":
            raw.write(b"\n")
            raw.flush()
        with results.open("a", encoding="utf-8") as file:
            yield file


def key_of(record: Mapping[str, Any]) -> Key:
    return record["setting"], record["method"], record["eta"], record["seed"]


def read_results(path: Path) -> dict[Key, dict[str, Any]]:
    """Return the finished runs. A line that a kill has cut short does not count."""
    records: dict[Key, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        records[key_of(record)] = record
    return records
