"""Slots and consumption in admission order: a head off-policyness bound that holds exactly.

A pure state machine: no clock, no I/O, no tasks. Events are pushed in, decisions are read out.

    admit()  ->  GENERATING  --finished-->  READY  --take_batch-->  TRAINING  --published-->  trained
                     |                        (in admission order)
                     +--failed-->  failed        filtered: a finished group that the filter refuses

A slot is charged by ``admit``. It is freed when the group is filtered or has failed, and otherwise only when
the version that was trained on it is *published*: until then the engines still serve the old version, and a
group admitted in its place would start one version too early.

Why the largest lag is eta. There are (eta + 1) * B slots. Let a group be admitted at version v. The groups
before it in admission order hold at most (eta + 1) * B - 1 slots. Either step v has not taken its batch, and
they fill less than eta + 1 batches, so that the group is trained at step v + eta at the latest; or B of them
are in training, and the other eta * B - 1 fill less than eta batches from step v + 1 on: v + eta again.
Groups that are filtered or fail only shorten the queue. Engines serve v or later from then on, so no token of
the group is older than v. (Restarted engines serve only after they have been brought to the current version.)

    >>> control = RolloutControl(batch_size=1, max_head_offpolicyness=0)
    >>> ticket = control.admit()
    >>> control.may_admit()          # synchronous: the next group waits for version 1
    False
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from rollout.trajectory import Group


class ControlError(RuntimeError):
    """An event that cannot happen in this state: a bug in the caller, never bad input."""


class _State(StrEnum):
    GENERATING = "generating"
    READY = "ready"
    TRAINING = "training"


@dataclass(frozen=True)
class Ticket:
    """Permission to generate one group."""

    id: int
    """Admission order over the run's life."""
    version: int
    """The published version at admission."""


@dataclass
class GroupCounts:
    """How many groups ended in which way; ``admitted`` = the others + groups in flight."""

    admitted: int = 0
    trained: int = 0
    filtered: int = 0
    expired: int = 0
    failed: int = 0

    @property
    def in_flight(self) -> int:
        return self.admitted - self.trained - self.filtered - self.expired - self.failed


@dataclass
class _Slot:
    version: int
    """At admission."""
    state: _State = _State.GENERATING
    group: Group | None = None


@dataclass
class RolloutControl:
    """Admission and consumption of groups. See the module for the lifecycle and the proof of the bound."""

    batch_size: int
    max_head_offpolicyness: int
    version: int = 0
    """The version that every serving engine has."""
    last_version: int | None = None
    """Where the run ends. What could not be trained by then is not admitted."""
    counts: GroupCounts = field(default_factory=GroupCounts)
    _slots: OrderedDict[int, _Slot] = field(default_factory=OrderedDict)

    @property
    def capacity(self) -> int:
        """Groups that may exist between admission and the publication of what they were trained into."""
        return (self.max_head_offpolicyness + 1) * self.batch_size

    @property
    def ready(self) -> int:
        return sum(slot.state is _State.READY for slot in self._slots.values())

    def may_admit(self) -> bool:
        wanted = self.capacity
        if self.last_version is not None:
            wanted = min(wanted, (self.last_version - self.version) * self.batch_size)
        return len(self._slots) < wanted

    def admit(self) -> Ticket:
        if not self.may_admit():
            raise ControlError(f"{len(self._slots)} groups hold a slot already")
        ticket = Ticket(self.counts.admitted, self.version)
        self.counts.admitted += 1
        self._slots[ticket.id] = _Slot(ticket.version)
        return ticket

    def finished(self, group: Group) -> None:
        """The group is complete, judged, and to be trained."""
        slot = self._generating(group.id)
        if group.admitted_at != slot.version:
            raise ControlError(
                f"group {group.id} was admitted at version {slot.version}, not at {group.admitted_at}"
            )
        slot.state, slot.group = _State.READY, group

    def filtered(self, ticket_id: int) -> None:
        """The group is complete and will not be trained."""
        self._generating(ticket_id)
        del self._slots[ticket_id]
        self.counts.filtered += 1

    def failed(self, ticket_id: int) -> None:
        """The group could not be generated or judged."""
        self._generating(ticket_id)
        del self._slots[ticket_id]
        self.counts.failed += 1

    def take_batch(self) -> list[Group] | None:
        """The next ``batch_size`` groups in admission order, or None while one of them is not ready.

        A slow group holds up its batch and is never overtaken: overtaking is what breaks the bound.
        """
        batch: list[_Slot] = []
        for slot in self._slots.values():
            if slot.state is _State.TRAINING:
                raise ControlError("the batch before this one has not been published")
            if slot.state is not _State.READY:
                return None
            batch.append(slot)
            if len(batch) == self.batch_size:
                for taken in batch:
                    taken.state = _State.TRAINING
                return [taken.group for taken in batch if taken.group is not None]
        return None

    def published(self, version: int) -> None:
        """The version trained on the batch is served by every engine; its slots are free."""
        if version != self.version + 1:
            raise ControlError(f"version {version} cannot follow {self.version}")
        trained = [i for i, slot in self._slots.items() if slot.state is _State.TRAINING]
        if not trained:
            raise ControlError(f"version {version} was trained on no batch of this run")
        for ticket_id in trained:
            del self._slots[ticket_id]
        self.counts.trained += len(trained)
        self.version = version

    def _generating(self, ticket_id: int) -> _Slot:
        slot = self._slots.get(ticket_id)
        if slot is None or slot.state is not _State.GENERATING:
            raise ControlError(f"group {ticket_id} is not being generated")
        return slot
