"""Group filters, which decide whether a finished group is worth training."""

from collections.abc import Sequence
from typing import Protocol

from slipstream.rollout.tokens.trajectory import Group, Trajectory


class GroupFilter(Protocol):
    """Any class with this method is a group filter; a recipe names it by import path."""

    def keep(self, group: Group) -> bool:
        """Return False to count the group as ``filtered`` and give its slot to a fresh group."""
        ...


class GroupChoice(Protocol):
    """Chooses the trajectories of a finished group to train; a group filter takes all or none."""

    def choose(self, group: Group) -> Sequence[Trajectory] | None:
        """Return its trajectories, some of them without loss; None: the group is not trained."""
        ...


class MixedRewards:
    """Keeps groups whose rewards differ: equal rewards give zero advantages, thus no gradient (DAPO)."""

    def keep(self, group: Group) -> bool:
        return len(set(group.rewards.tolist())) > 1
