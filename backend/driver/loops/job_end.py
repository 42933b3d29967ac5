"""The end of a Slurm job, and how long before it a run begins to end by itself.

    recipe ──► lead ◄── step_done, checkpoint_done: what they really take
                 └──► left_s ──► ``Stop``: ends after the step, with a checkpoint

A signal with a fixed lead would come too late for long steps and too early for short ones. So the lead is
first computed from the time that the recipe allows for a step and a checkpoint, and then from the ones that
the run has measured, in this job or in one before.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from slipstream.backend.monitor.metrics import METRICS_FILE
from slipstream.configs.schema import RunConfig
from slipstream.rollout.system.lines import read_lines

JOB_END = "SLURM_JOB_END_TIME"
"""Variable with the end of the job in seconds since the epoch, which Slurm or slurm/train.sbatch sets."""

CLEAN_UP_S = 60.0
"""Seconds in which engines, trainer and Ray end on every node. slurm/train.sbatch waits as long for Ray."""

SHORTEST_S = 4 * CLEAN_UP_S
"""Shortest time limit with which a run is started: engines and trainer must start, train and end."""

MARGIN = 1.5
"""A step or a checkpoint may take this many times as long as the longest of the recent ones."""

RECENT = 16
"""Number of steps, and of checkpoints, from which the longest one is taken."""

LAST_CHECKPOINTS = 2
"""Checkpoints that a run may write at its end: the one that is being written, and the one of its end."""


class JobEnd:
    """Says when a run begins to end before its job does. It has no clock of its own."""

    def __init__(
        self, left_s: float, step_s: float, checkpoint_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``left_s``: seconds to the end of the job. ``step_s``, ``checkpoint_s``: longest time that the
        recipe allows for a step and for a checkpoint."""
        self._clock = clock
        self._end = clock() + left_s
        self._most_unmeasured_s = left_s / 4
        self._step_s, self._checkpoint_s = step_s, checkpoint_s
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._checkpoints: deque[float] = deque(maxlen=RECENT)

    def step_done(self, seconds: float) -> None:
        """Note how long a training step and its publication took, without the wait for its batch."""
        self._steps.append(seconds)

    def checkpoint_done(self, seconds: float) -> None:
        """Note how long a checkpoint took from its begin until it was committed."""
        self._checkpoints.append(seconds)

    @property
    def lead_s(self) -> float:
        """Seconds before the end of the job at which the run begins to end.

        A step and a checkpoint that were not measured may take as long as the recipe allows, but nearly all
        take a small part of that: they get a quarter of the job at most.
        """
        measured_s = unmeasured_s = 0.0
        for limit_s, times, number in (
            (self._step_s, self._steps, 1),
            (self._checkpoint_s, self._checkpoints, LAST_CHECKPOINTS),
        ):
            if times:
                measured_s += number * min(limit_s, MARGIN * max(times))
            else:
                unmeasured_s += limit_s
        return measured_s + min(unmeasured_s, self._most_unmeasured_s) + CLEAN_UP_S

    @property
    def left_s(self) -> float:
        """Seconds until the run begins to end; 0 if the time has come."""
        return max(self._end - self._clock() - self.lead_s, 0.0)


def earlier_steps(folder: Path) -> list[float]:
    """Return the seconds of the last ``RECENT`` steps of earlier starts of a run, given its folder."""
    path = folder / METRICS_FILE
    steps: deque[float] = deque(maxlen=RECENT)
    for record in read_lines(path) if path.exists() else ():
        whole, waited = record.get("perf/step_s"), record.get("perf/trainer_wait_s")
        if isinstance(whole, int | float) and isinstance(waited, int | float):
            steps.append(whole - waited)
    return list(steps)


def seconds_left(variables: Mapping[str, str], now: float) -> float | None:
    """Return the seconds from ``now`` to the end of the job; None outside of a job and without a limit."""
    end = variables.get(JOB_END, "")
    return float(end) - now if end.isdigit() and int(end) > 0 else None


def job_end(config: RunConfig, variables: Mapping[str, str], now: float) -> JobEnd | None:
    """Return the end of the Slurm job that a run is in; None if it has no limit. ``now``: since the epoch."""
    left = seconds_left(variables, now) if config.cluster.type == "slurm" else None
    if left is None:
        return None
    return JobEnd(
        left, config.run.step_timeout_s, config.checkpoint.timeout_s if config.checkpoint.every else 0.0
    )
