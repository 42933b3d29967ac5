"""The end of a Slurm job, and how long before it a run begins to end by itself.

A signal with a fixed lead would come too late for long steps: a run ends after its present training step and
with a checkpoint. So the lead is computed from the time that the recipe allows for both and from the time
limit of the job.
"""

from collections.abc import Mapping

from slipstream.configs.schema import RunConfig

JOB_END = "SLURM_JOB_END_TIME"
"""Variable with the end of the job in seconds since the epoch, which Slurm or slurm/train.sbatch sets."""

CLEAN_UP_S = 60.0
"""Seconds in which engines, trainer and Ray end on every node. slurm/train.sbatch waits as long for Ray."""

SHORTEST_S = 4 * CLEAN_UP_S
"""Shortest time limit with which a run is started: engines and trainer must start, train and end."""


def lead_s(config: RunConfig, left_s: float) -> float:
    """Return how many seconds before the end of its job a run begins to end. ``left_s``: seconds to that end.

    A step and a checkpoint may take as long as the recipe allows, but nearly all take a small part of that: a
    job that is not much longer keeps three quarters of its time for training.
    """
    return min(config.run.step_timeout_s + config.checkpoint.timeout_s, left_s / 4) + CLEAN_UP_S


def seconds_left(variables: Mapping[str, str], now: float) -> float | None:
    """Return the seconds from ``now`` to the end of the job; None outside of a job and without a limit."""
    end = variables.get(JOB_END, "")
    return float(end) - now if end.isdigit() and int(end) > 0 else None


def stop_after_s(config: RunConfig, variables: Mapping[str, str], now: float) -> float | None:
    """Return the seconds after which a run in a Slurm job begins to end; None if it has no limit."""
    left = seconds_left(variables, now) if config.cluster.type == "slurm" else None
    return None if left is None else max(left - lead_s(config, left), 0.0)
