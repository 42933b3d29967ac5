"""Numbers about live users, for metrics."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.rollout.control.live_door import TurnEnd
from slipstream.rollout.reward.live import VoteCounts


@dataclass(frozen=True)
class LiveStatus:
    """State of the turns of live users at one moment."""

    waiting: int
    """Turns after which nothing has come yet."""
    unjudged: int
    """Turns that wait for their verdict."""
    ready: int
    """Turns that wait for a training step."""
    oldest_waiting_s: float
    """Seconds since the end of the oldest of the answers that wait for what comes next; 0 without any."""
    oldest_unjudged_s: float
    oldest_ready_s: float
    ends: Mapping[TurnEnd, int]
    """Turns that reached each end, over the whole run."""
    side_reasons: Mapping[str, int]
    """Side turns of this process, by reason; empty: the client says so."""
    verdicts: int
    """Verdicts of judges with a score, in this process."""
    put_off: int
    """Number of times that a turn was put off without a verdict, in this process."""
    given_up: int
    """Number of turns that have failed because they waited too long for their verdicts, in this process."""
    votes: VoteCounts
    """Votes of language models that gave no verdict, or were not needed for it, in this process."""
    judge_outages: int
    """Number of times that judge processes could not be started, in this process."""
    late_rewards: int
    """Rewards of clients for turns that had ended, in this process."""
    baseline: float | None
    """Mean of the scores that were trained; None: nothing was, or there is no baseline."""
    since: "SinceLastBatch"


EXPIRED_KEPT = 1 << 14
"""Turns that are told of. They expire by their age also while nothing is trained, however long that lasts."""


@dataclass
class SinceLastBatch:
    """Turns that have ended since the last batch was taken, and the turns of that batch."""

    expired_lags: deque[int] = field(default_factory=lambda: deque[int](maxlen=EXPIRED_KEPT))
    """Lag of each turn that has expired, in updates; of the newest ``EXPIRED_KEPT`` at most."""
    expired_ages_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=EXPIRED_KEPT))
    """Seconds since the end of its answer."""
    trained_ages_s: list[float] = field(default_factory=list[float])
    """Seconds from the end of each turn of the batch until the batch was taken."""
    scores: Sequence[float] = ()
    """Score of each turn of the batch."""
