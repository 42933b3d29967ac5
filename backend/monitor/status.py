"""Data for metrics and the summary: the status of a run, and the account of a training step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.bridge.publish.report import PublishReport
from slipstream.rollout.control.ends import GroupCounts, Loss
from slipstream.rollout.control.slots import State
from slipstream.rollout.live.status import LiveStatus
from slipstream.rollout.tokens.trajectory import TrajectoryHeader


@dataclass(frozen=True)
class RunStatus:
    """Status of a run at one moment. Counters are totals over the run unless they name this process."""

    version: int
    step: int
    """Training steps done."""
    counts: GroupCounts
    losses: Mapping[Loss, int]
    """Groups lost, by cause."""
    states: Mapping[State, int]
    """Groups that have not ended, by state."""
    tokens_generated: int
    """Sampled by this process's engines, for users too; evaluation does not count."""
    requests_running: int
    """For rollouts."""
    requests_limit: int
    requests_resent: int
    engine_restarts: int
    collector_restarts: int
    live: LiveStatus | None = None
    """Turns of the users of a gateway; None: there is no gateway."""
    live_requests_running: int = 0
    """For users."""
    trainer_restarts: int = 0
    engines_serving: int = 0
    transports_given_up: int = 0
    """Transports whose first publication has failed, before the one that versions take now."""


@dataclass(frozen=True)
class StepTimes:
    """Durations of one training step in seconds."""

    wait_s: float
    """Time spent waiting for the batch."""
    train_s: float
    step_s: float
    """The whole step, publication included."""


@dataclass(frozen=True)
class TrainedStep:
    """One training step and the publication of its version."""

    trajectories: Sequence[TrajectoryHeader]
    lags: Mapping[int, int]
    """Lag of each policy version whose tokens were trained."""
    version: int
    """Policy version that the step produced; the engines hold it."""
    metrics: Mapping[str, float]
    """Metrics of the trainer, by the tags of ``tags.py``."""
    report: PublishReport
    times: StepTimes
    is_logged: bool = False
    """True if a hook has logged what the batch's trajectories are like."""
    sources: Sequence[str] = ()
    """Name of the source of each trajectory's prompt, for those of prompts, which come first; empty where
    there is one source."""
