"""The groups between admission and the end of their training step, in admission order. Pure data."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from slipstream.rollout.trajectory import Group


class State(StrEnum):
    """State of a group. The last four are ends: a group reaches exactly one of them, once."""

    ADMITTED = "admitted"
    GENERATING = "generating"
    JUDGING = "judging"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    FILTERED = "filtered"
    EXPIRED = "expired"
    FAILED = "failed"


OPEN = frozenset({State.ADMITTED, State.GENERATING, State.JUDGING})
"""States in which a group is still being worked on."""


@dataclass(slots=True)
class Slot:
    """The slot of one group, from its admission on."""

    id: int
    """Number of the group."""
    order: int
    """Admission order within this epoch of the run; a restart admits unfinished groups anew."""
    version: int
    """Policy version at admission. No token of the group is older."""
    state: State = State.ADMITTED
    group: Group | None = None
    """The trajectories, once the group is ready."""
    requeues: int = 0
    """Number of times that the prompt of the group was requeued."""


@dataclass
class SlotTable:
    """All slots in admission order, with the counts that policies ask for: no query walks over all slots."""

    states: dict[State, int] = field(default_factory=lambda: dict.fromkeys(State, 0))
    """Number of slots in each state."""
    waiting: Counter[int] = field(default_factory=Counter[int])
    """Number of slots that are not in training, by admission version."""
    ready: Counter[int] = field(default_factory=Counter[int])
    """Number of ready slots, by admission version."""
    _slots: dict[int, Slot] = field(default_factory=dict[int, Slot])
    """By group number."""
    _ready_order: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Heap of (order, id). Entries of slots that are no longer ready are skipped when they come up."""
    _next_order: int = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        """Iterate in admission order."""
        return iter(self._slots.values())

    def get(self, id_: int) -> Slot | None:
        return self._slots.get(id_)

    @property
    def open(self) -> int:
        """Number of groups that are still being worked on."""
        states = self.states
        return states[State.ADMITTED] + states[State.GENERATING] + states[State.JUDGING]

    def add(self, id_: int, version: int, requeues: int = 0) -> Slot:
        slot = Slot(id_, self._next_order, version, requeues=requeues)
        self._next_order += 1
        self._slots[id_] = slot
        self.states[State.ADMITTED] += 1
        self.waiting[version] += 1
        return slot

    def move(self, slot: Slot, state: State) -> None:
        """Move a slot to another state that is no end."""
        self.states[slot.state] -= 1
        self.states[state] += 1
        if state is State.READY:
            self.ready[slot.version] += 1
            heapq.heappush(self._ready_order, (slot.order, slot.id))
        elif slot.state is State.READY:
            self._decrease(self.ready, slot.version)
        if state is State.TRAINING:
            self._decrease(self.waiting, slot.version)
        slot.state = state

    def remove(self, slot: Slot) -> None:
        """Free the slot: its group has ended."""
        self.states[slot.state] -= 1
        if slot.state is not State.TRAINING:
            self._decrease(self.waiting, slot.version)
        if slot.state is State.READY:
            self._decrease(self.ready, slot.version)
        del self._slots[slot.id]

    def oldest_ready(self) -> Slot | None:
        """Return the ready slot that was admitted first, and leave it where it is."""
        heap = self._ready_order
        while heap:
            slot = self._slots.get(heap[0][1])
            if slot is not None and slot.state is State.READY and slot.order == heap[0][0]:
                return slot
            heapq.heappop(heap)
        return None

    def oldest_ready_slots(self, n: int, stop_at: Callable[[Slot], bool]) -> Iterator[Slot]:
        """Yield each of the ``n`` oldest ready slots that satisfies ``stop_at``.

        The caller may remove the slot that was yielded; the next oldest then takes its place among the ``n``.
        """
        passed: list[tuple[int, int]] = []
        try:
            while len(passed) < n and (slot := self.oldest_ready()) is not None:
                if stop_at(slot):
                    yield slot
                    if slot.id not in self._slots:
                        continue
                passed.append(heapq.heappop(self._ready_order))
        finally:
            for entry in passed:
                heapq.heappush(self._ready_order, entry)

    def take_oldest_ready(self) -> Slot:
        """Move the ready slot that was admitted first to training. There must be a ready slot."""
        slot = self.oldest_ready()
        assert slot is not None
        heapq.heappop(self._ready_order)
        self.move(slot, State.TRAINING)
        return slot

    @staticmethod
    def _decrease(counter: Counter[int], version: int) -> None:
        counter[version] -= 1
        if not counter[version]:
            del counter[version]
