"""Consumption policies, which decide when the oldest ready groups make the next batch. Pure.

Let B be the batch size, eta the bound and t the next training step. A group of standing s (``core`` defines
standings) may be trained at step s + eta at the latest: its *deadline*. ``Fifo`` and ``Windowed`` meet every
deadline by waiting. ``ReadyFirst`` waits for no particular group, and gives up the tokens that are too old.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from slipstream.rollout.control.slots import SlotTable, State


@dataclass(frozen=True, slots=True)
class Due:
    """The training step that asks for a batch."""

    batch_size: int
    bound: int
    step: int
    """Number of the step: number of updates that led to the version that it starts from."""
    surplus: int
    """Over-sampled groups: so many may miss their deadline, and are then given up."""


class OnStale(StrEnum):
    """Treatment of a ready group that holds tokens beyond the bound."""

    MASK = "mask"
    REQUEUE = "requeue"
    DROP = "drop"
    TRAIN = "train"
    """Train the group beyond the bound. For comparisons in the simulator; no recipe can ask for it."""


class ConsumptionPolicy(Protocol):
    @property
    def on_stale(self) -> OnStale | None:
        """Treatment of groups beyond the bound; None for a policy that meets all deadlines."""
        ...

    def reserve(self, batch_size: int, bound: int) -> int:
        """Return how many of the (bound + 1) * batch_size slots are never given to a group."""
        ...

    def complete(self, table: SlotTable, due: Due) -> bool:
        """True if the ``due.batch_size`` oldest ready groups may be trained now."""
        ...


class Fifo:
    """Trains groups in admission order; a slow group holds up its batch."""

    on_stale = None

    def __init__(self) -> None:
        self._blocked_by: int | None = None
        """First group that was not ready at the last look. Until this group has moved or others have returned
        in front of it, the result is the same."""
        self._returns = 0

    def reserve(self, batch_size: int, bound: int) -> int:
        return 0

    def complete(self, table: SlotTable, due: Due) -> bool:
        if self._blocked_by is not None and self._returns == table.returns:
            slot = table.get(self._blocked_by)
            if slot is not None and slot.state is not State.READY:
                return False
        self._blocked_by, self._returns = None, table.returns
        ready = 0
        for slot in table:
            if ready == due.batch_size:
                return True
            if slot.state is not State.READY:
                self._blocked_by = slot.id
                return False
            ready += 1
        return ready == due.batch_size


@dataclass(frozen=True)
class Windowed:
    """Trains the oldest ready groups as soon as all other groups can still meet their deadlines.

    After step t, there are s + eta - t steps until the deadline of standing s. So a batch may be taken if for
    each s at most B * (s + eta - t) groups of standing s or less are left (plus the surplus). Taking the
    oldest ready groups leaves the fewest. Where no batch could leave fewer, nothing is gained by waiting, and
    the batch is not held up.

    Without a reserve there are so many slots that in a steady state every old group is needed for the batch.
    Each slot in reserve lets one more group be overtaken.
    """

    fraction: float
    """Share of the slots that is kept in reserve."""
    on_stale = None

    def reserve(self, batch_size: int, bound: int) -> int:
        return min(math.floor(self.fraction * (bound + 1) * batch_size), bound * batch_size)

    def complete(self, table: SlotTable, due: Due) -> bool:
        waiting = ready = 0
        for standing in sorted(table.waiting):
            waiting += table.waiting[standing]
            ready += table.ready[standing]
            taken = min(ready, due.batch_size)
            allowed = due.batch_size * (standing + due.bound - due.step) + due.surplus
            if waiting - taken > allowed and taken < min(waiting, due.batch_size):
                return False
        return ready >= due.batch_size


@dataclass(frozen=True)
class ReadyFirst:
    """Trains the oldest ready groups as soon as there are enough of them, treated as ``on_stale`` says."""

    on_stale: OnStale

    def reserve(self, batch_size: int, bound: int) -> int:
        return 0

    def complete(self, table: SlotTable, due: Due) -> bool:
        return table.trainable >= due.batch_size
