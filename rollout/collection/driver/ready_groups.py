"""Groups that are complete and judged, as batches are made of them: headers, and places in the ledger."""

from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.rollout.tokens.trajectory import TrajectoryHeader, count_tokens


class StoredTrajectory(NamedTuple):
    """A judged trajectory: its header, and where its chunks are in the ledger."""

    header: TrajectoryHeader
    refs: bytes
    """``record.REF`` of each chunk, one behind the other."""


@dataclass(slots=True)
class ReadyGroup:
    """The trajectories of one group, complete and judged. Its tokens are counted once, when it is made."""

    id: int
    trajectories: tuple[StoredTrajectory, ...]
    trained_tokens: dict[int, int] = field(init=False)
    """Number of tokens that carry loss, by policy version."""
    sampled_length: int = field(init=False)
    """Number of sampled tokens."""

    def __post_init__(self) -> None:
        self.trained_tokens, self.sampled_length = count_tokens(self.headers)

    @property
    def headers(self) -> list[TrajectoryHeader]:
        return [trajectory.header for trajectory in self.trajectories]


def masked(group: ReadyGroup, stale: frozenset[int]) -> ReadyGroup:
    """Return the group, in which no token of the versions ``stale`` carries loss."""
    if not stale:
        return group
    return ReadyGroup(
        group.id,
        tuple(StoredTrajectory(each.header.without(stale), each.refs) for each in group.trajectories),
    )
