"""Which finished groups are worth training. A filter is any class with this one method."""

from typing import Protocol

from slipstream.rollout.trajectory import Group


class GroupFilter(Protocol):
    def keep(self, group: Group) -> bool:
        """False: the group is counted as ``filtered`` and its slot goes to a fresh one."""
        ...


class MixedRewards:
    """Keeps groups whose rewards differ: equal rewards give zero advantages, thus no gradient (DAPO)."""

    def keep(self, group: Group) -> bool:
        return bool(group.rewards.max() > group.rewards.min())
