"""The groups between admission and the end of their training step, in admission order. Pure data."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum


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
    """Admission order within this life of the run; a restart admits unfinished groups anew."""
    standing: int
    """Smallest standing of the tokens that the group has or can get (``core`` defines standings)."""
    state: State = State.ADMITTED
    versions: frozenset[int] = frozenset()
    """Policy versions of the tokens that carry loss, once the group is ready."""
    requeues: int = 0
    """Number of times that the prompt of the group was requeued."""
    is_withheld: bool = False
    """True while a ready group is left out of batches."""


@dataclass
class SlotTable:
    """All slots in admission order, with the counts that policies ask for: no query walks over all slots.

    Policies do not see withheld slots: ``len``, iteration, ``waiting`` and ``ready`` leave them out.
    """

    states: dict[State, int] = field(default_factory=lambda: dict.fromkeys(State, 0))
    """Number of slots in each state, withheld ones included."""
    waiting: Counter[int] = field(default_factory=Counter[int])
    """Number of slots that are not in training, by standing."""
    ready: Counter[int] = field(default_factory=Counter[int])
    """Number of ready slots, by standing."""
    withheld: dict[int, Slot] = field(default_factory=dict[int, Slot])
    """Ready slots that are left out of batches, by group number."""
    returns: int = 0
    """Number of times that slots may have become ready in front of others: ``withhold``, ``give_back``."""
    _slots: dict[int, Slot] = field(default_factory=dict[int, Slot])
    """By group number."""
    _ready_order: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Heap of (order, id), once for each ready slot that is not withheld. Entries of slots that are no longer
    ready are skipped when they come up."""
    _next_order: int = 0

    def __len__(self) -> int:
        return len(self._slots) - len(self.withheld)

    def __iter__(self) -> Iterator[Slot]:
        """Iterate in admission order."""
        if not self.withheld:
            return iter(self._slots.values())
        return (slot for slot in self._slots.values() if not slot.is_withheld)

    def get(self, id_: int) -> Slot | None:
        """Return the slot of a group, withheld or not."""
        return self._slots.get(id_)

    @property
    def open(self) -> int:
        """Number of groups that are still being worked on."""
        states = self.states
        return states[State.ADMITTED] + states[State.GENERATING] + states[State.JUDGING]

    @property
    def trainable(self) -> int:
        """Number of ready slots that are not withheld."""
        return self.states[State.READY] - len(self.withheld)

    def add(self, id_: int, standing: int, requeues: int = 0) -> Slot:
        slot = Slot(id_, self._next_order, standing, requeues=requeues)
        self._next_order += 1
        self._slots[id_] = slot
        self.states[State.ADMITTED] += 1
        self.waiting[standing] += 1
        return slot

    def move(self, slot: Slot, state: State) -> None:
        """Move a slot that is not withheld to another state that is no end."""
        self.states[slot.state] -= 1
        self.states[state] += 1
        if slot.state is State.READY:
            self._decrease(self.ready, slot.standing)
        if slot.state is State.TRAINING:
            self.waiting[slot.standing] += 1
        if state is State.READY:
            self.ready[slot.standing] += 1
            heapq.heappush(self._ready_order, (slot.order, slot.id))
        if state is State.TRAINING:
            self._decrease(self.waiting, slot.standing)
        slot.state = state

    def remove(self, slot: Slot) -> None:
        """Free the slot: its group has ended."""
        self.states[slot.state] -= 1
        del self._slots[slot.id]
        if slot.is_withheld:
            del self.withheld[slot.id]
            return
        if slot.state is not State.TRAINING:
            self._decrease(self.waiting, slot.standing)
        if slot.state is State.READY:
            self._decrease(self.ready, slot.standing)

    def lower(self, slot: Slot, standing: int) -> None:
        """Give a smaller standing to a slot that is not in training."""
        if not slot.is_withheld:
            self._decrease(self.waiting, slot.standing)
            self.waiting[standing] += 1
            if slot.state is State.READY:
                self._decrease(self.ready, slot.standing)
                self.ready[standing] += 1
        slot.standing = standing

    def withhold(self, slots: Iterable[Slot]) -> None:
        """Leave out exactly these ready slots; slots that were withheld before are seen again."""
        for slot in self.withheld.values():
            slot.is_withheld = False
            self.waiting[slot.standing] += 1
            self.ready[slot.standing] += 1
        self.withheld = {slot.id: slot for slot in slots}
        for slot in self.withheld.values():
            slot.is_withheld = True
            self._decrease(self.waiting, slot.standing)
            self._decrease(self.ready, slot.standing)
        # Built anew, because an entry that comes up while its slot is withheld is dropped. Sorted: a heap.
        self._ready_order = [(slot.order, slot.id) for slot in self if slot.state is State.READY]
        self.returns += 1

    def give_back(self, slots: Iterable[Slot]) -> None:
        """Move slots in training back to the ready ones, in their old order."""
        for slot in slots:
            self.move(slot, State.READY)
        self.returns += 1

    def oldest_ready(self) -> Slot | None:
        """Return the ready slot that was admitted first and is not withheld, and leave it where it is."""
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
        """Move the oldest ready slot that is not withheld to training. There must be such a slot."""
        slot = self.oldest_ready()
        assert slot is not None
        heapq.heappop(self._ready_order)
        self.move(slot, State.TRAINING)
        return slot

    @staticmethod
    def _decrease(counter: Counter[int], standing: int) -> None:
        counter[standing] -= 1
        if not counter[standing]:
            del counter[standing]
