"""The ends of groups: the reasons for which one is never trained, and the account of all of them."""

from dataclasses import dataclass
from enum import StrEnum

from slipstream.rollout.control.slots import State


class Loss(StrEnum):
    """Reason why a group was never trained."""

    FILTERED = "filtered"
    FAILED = "failed"
    QUARANTINED = "quarantined"
    """Failed: the group kills the trainer."""
    STALE = "stale"
    """Expired: overdue, or no token is left within the bound, or `on_stale: drop`."""
    REQUEUED = "requeued"
    """Expired: `on_stale: requeue`; its prompt is admitted again."""
    SURPLUS = "surplus"
    """Expired: over-sampled, and its deadline has passed."""

    @property
    def end(self) -> State:
        """State in which a group ends for this reason."""
        ends = {
            Loss.FILTERED: State.FILTERED,
            Loss.FAILED: State.FAILED,
            Loss.QUARANTINED: State.FAILED,
        }
        return ends.get(self, State.EXPIRED)


@dataclass
class GroupCounts:
    """Number of groups admitted, and of groups that reached each end."""

    admitted: int = 0
    trained: int = 0
    filtered: int = 0
    expired: int = 0
    failed: int = 0

    @property
    def in_flight(self) -> int:
        """Groups that have not ended."""
        return self.admitted - self.trained - self.filtered - self.expired - self.failed
