"""Group filters, which decide whether a finished group is worth training."""

from typing import Protocol

from slipstream.rollout.tokens.trajectory import Group


class GroupFilter(Protocol):
    """Any class with this method is a group filter; a recipe names it by import path."""

    def keep(self, group: Group) -> bool:
        """Return False to count the group as ``filtered`` and give its slot to a fresh group."""
        ...


class MixedRewards:
    """Keeps groups whose rewards differ: equal rewards give zero advantages, thus no gradient (DAPO)."""

    def keep(self, group: Group) -> bool:
        return len(set(group.rewards.tolist())) > 1
