"""Consumption policies: which ready groups make the next batch? Pure.

Let B be the batch size, eta the bound, t the version that the next step starts from. A group that was
admitted at version v may be trained at step v + eta at the latest, its *deadline*. ``Fifo`` and
``Windowed`` meet every deadline by waiting, ``ReadyFirst`` never waits for a particular group and pays with
tokens.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from slipstream.rollout.control.slots import SlotTable, State


@dataclass(frozen=True, slots=True)
class Due:
    """The step that wants a batch."""

    batch_size: int
    bound: int
    version: int
    surplus: int
    """Groups that may miss their deadline and are given up then (over-sampling)."""


class OnStale(StrEnum):
    """What becomes of a ready group that holds tokens outside the bound."""

    MASK = "mask"
    REQUEUE = "requeue"
    DROP = "drop"
    TRAIN = "train"
    """Nothing: the bound is not kept. For comparison in the simulator; no recipe can ask for it."""


class ConsumptionPolicy(Protocol):
    on_stale: OnStale | None
    """None: no group is ever late, because the policy waits for the ones that would be."""

    def reserve(self, batch_size: int, bound: int) -> int:
        """How many of the (bound + 1) * batch_size slots are not to be admitted to."""
        ...

    def complete(self, table: SlotTable, due: Due) -> bool:
        """Whether the ``due.batch_size`` oldest ready groups may be trained now."""
        ...


class Fifo:
    """In admission order exactly; a slow group holds up its batch."""

    on_stale = None

    def __init__(self) -> None:
        self._blocked_by: int | None = None
        """The first group that was not ready when last looked: nothing changes before it has moved."""

    def reserve(self, batch_size: int, bound: int) -> int:
        return 0

    def complete(self, table: SlotTable, due: Due) -> bool:
        if self._blocked_by is not None:
            slot = table.get(self._blocked_by)
            if slot is not None and slot.state is not State.READY:
                return False
        self._blocked_by = None
        for number, slot in enumerate(table):
            if number == due.batch_size:
                return True
            if slot.state is not State.READY:
                self._blocked_by = slot.id
                return False
        return len(table) >= due.batch_size


@dataclass(frozen=True)
class Windowed:
    """Oldest ready first, as far as every group can still meet its deadline.

    After step t there are v + eta - t steps until the groups of version v must have been trained, so the
    batch may be taken if for each v at most B * (v + eta - t) groups of version v and older are left.
    Taking the oldest ready ones leaves the fewest. Without a reserve the slots are so many that in a steady
    state every old group is needed; each reserved slot is one more group that may be overtaken.
    """

    fraction: float
    on_stale = None

    def reserve(self, batch_size: int, bound: int) -> int:
        return min(math.floor(self.fraction * (bound + 1) * batch_size), bound * batch_size)

    def complete(self, table: SlotTable, due: Due) -> bool:
        left = ready = 0
        for version in sorted(table.waiting):
            left += table.waiting[version]
            ready += table.ready[version]
            allowed = due.batch_size * (version + due.bound - due.version) + due.surplus
            if left - min(ready, due.batch_size) > allowed:
                return False
        return ready >= due.batch_size


@dataclass(frozen=True)
class ReadyFirst:
    """Oldest ready first, waiting for nobody; what is late by then is treated by ``on_stale``."""

    on_stale: OnStale

    def reserve(self, batch_size: int, bound: int) -> int:
        return 0

    def complete(self, table: SlotTable, due: Due) -> bool:
        return table.states[State.READY] >= due.batch_size
