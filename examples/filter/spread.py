"""Keeps the groups whose rewards differ by at least `least`: the others would give no gradient."""

from slipstream import Group


class Spread:
    def __init__(self, least: float = 0.0) -> None:
        self.least = least

    def keep(self, group: Group) -> bool:
        return float(group.rewards.max() - group.rewards.min()) > self.least
