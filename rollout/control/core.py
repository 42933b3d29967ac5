"""Which groups may start and which may be trained, so that no trained token is older than the bound.

A pure state machine: no clock, no I/O, no tasks. Events are pushed in, decisions are read out.

    admit() -> ADMITTED -> GENERATING <-> JUDGING -> READY --take_batch--> TRAINING --published--> trained
                  |                                    |
                  +---- failed, filtered               +---- expired: too old, or one more than needed

A slot is charged by ``admit``. It is freed when the group is filtered, has failed or has expired, and
otherwise only when the version that was trained on it is *published*: until then the engines still serve
the old version, and a group admitted in its place would start one version too early.

Why no lag exceeds the bound eta. Let B be the batch size and W(v) the groups of version v and older that are
not in training. Claim: when step t is about to take its batch, W(v) <= B * (v + eta - t + 1) for every v.
Admission: at most (eta + 1) * B slots are held at version t, and if B of them are in training, at most eta
* B are not; both are what the claim asks for v = t, before and after the batch. Consumption: a policy takes
a batch only if W(v) <= B * (v + eta - t) is left, which is the claim for step t + 1 (``Windowed`` checks
just this; the B oldest groups, which ``Fifo`` takes, satisfy it always). For v = t - eta nothing is left:
every group of version v has been trained at step v + eta or before. Filtered and failed groups only make W
smaller. Engines serve v or later from a group's admission on, so that no token of it is older than v.
Nobody waits forever: once the B oldest groups are ready, every policy takes them.

``ReadyFirst`` makes no such promise about groups, and removes tokens of a lag above eta from what is trained.
Nor does a group lose all of its tokens. What is trained between the moment at which it becomes ready, at
version w, and its own training is older and was there already: with the group itself at most (eta + 1) * B
slots, of which a batch in training holds B. So it is trained at step w + eta or before, and its last tokens
are of version w. (This needs a reward that takes no longer than a step, and no over-sampling.)

    >>> control = RolloutControl(batch_size=1, bound=0)
    >>> ticket = control.admit()
    >>> control.may_admit()          # synchronous: the next group waits for version 1
    False
"""

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from enum import StrEnum

from slipstream.rollout.control.admission import AdmissionPolicy, Slots
from slipstream.rollout.control.consumption import ConsumptionPolicy, Due, Fifo, OnStale
from slipstream.rollout.control.slots import OPEN, Slot, SlotTable, State
from slipstream.rollout.trajectory import Group

REQUEUES = 3
"""How often the prompt of a group that was too old is generated again: a prompt whose answers always take
longer than the bound would otherwise hold a slot for the rest of the run."""


class ControlError(RuntimeError):
    """An event that cannot happen in this state: a bug in the caller, never bad input."""


class Loss(StrEnum):
    """Why a group was never trained."""

    FILTERED = "filtered"
    FAILED = "failed"
    STALE = "stale"
    """Expired: no token within the bound is left, or `on_stale: drop`."""
    REQUEUED = "requeued"
    """Expired: `on_stale: requeue`; its prompt is admitted again."""
    SURPLUS = "surplus"
    """Expired: over-sampled, and its deadline has passed."""

    @property
    def end(self) -> State:
        return {Loss.FILTERED: State.FILTERED, Loss.FAILED: State.FAILED}.get(self, State.EXPIRED)


@dataclass(frozen=True)
class Ticket:
    """Permission to generate one group."""

    id: int
    """Admission number over the run's life. After a restart, unfinished groups are admitted again."""
    version: int
    """The published version at admission."""
    requeued_from: int | None = None
    """The expired group whose prompt this one takes over."""


@dataclass(frozen=True)
class Expired:
    """A group that the core has given up. What is still generating for it is to be cancelled."""

    id: int
    loss: Loss
    group: Group | None
    """If it was ready."""


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
class RolloutControl:
    """Admission and consumption of groups. See the module for the lifecycle and the proof of the bound."""

    batch_size: int
    bound: int
    """rollout.max_head_offpolicyness"""
    admission: AdmissionPolicy = field(default_factory=Slots)
    consumption: ConsumptionPolicy = field(default_factory=Fifo)
    over_sampling: float = 1.0
    """Groups admitted per group that a batch needs. What a batch did not need in time is given up."""
    version: int = 0
    """The version that every serving engine has."""
    step: int = 0
    """Training steps done on the way to it."""
    last_step: int | None = None
    """Where the run ends. What could not be trained by then is not admitted."""
    counts: GroupCounts = field(default_factory=GroupCounts)
    losses: Counter[Loss] = field(default_factory=Counter)
    accepted: int = 0
    """Groups that are ready, in training or trained, for ``VolumeGate``."""
    _table: SlotTable = field(default_factory=SlotTable)
    _training: list[Slot] = field(default_factory=list)
    _unstarted: deque[int] = field(default_factory=deque)
    """Groups admitted before a restart, of which nothing is left that could be continued."""
    _requeued: deque[tuple[int, int]] = field(default_factory=deque)
    """Expired groups whose prompts are to be admitted again, and how often that has happened to them."""
    _expired: list[Expired] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._surplus = int((self.over_sampling - 1) * self.batch_size + 0.5)
        reserve = self.consumption.reserve(self.batch_size, self.bound)
        self.capacity = (self.bound + 1) * self.batch_size - reserve + self._surplus
        """Groups that may exist between admission and the publication of what they were trained into."""

    @property
    def held(self) -> int:
        return len(self._table)

    @property
    def open(self) -> int:
        return self._table.open

    @property
    def ready(self) -> int:
        return self.states[State.READY]

    @property
    def states(self) -> dict[State, int]:
        """Groups that have not ended, by state."""
        return self._table.states

    # ---- admission

    def may_admit(self) -> bool:
        held = len(self._table)
        if self.last_step is not None:
            needed = (self.last_step - self.step) * self.batch_size
            if held >= needed + (self._surplus if needed else 0):
                return False
        return self.admission.may_admit(self)

    def admit(self) -> Ticket:
        """A slot for the next group: one that a restart left unstarted, else a requeued prompt, else a new
        one.
        """
        if not self.may_admit():
            raise ControlError(f"{len(self._table)} groups hold a slot already")
        if self._unstarted:
            ticket = Ticket(self._unstarted.popleft(), self.version)
            self._table.add(ticket.id, ticket.version)
            return ticket
        before, requeues = self._requeued.popleft() if self._requeued else (None, 0)
        ticket = Ticket(self.counts.admitted, self.version, before)
        self.counts.admitted += 1
        self._table.add(ticket.id, ticket.version, requeues)
        return ticket

    # ---- events of one group

    def generating(self, id_: int) -> None:
        """A first answer of the group is asked for."""
        self._table.move(self._open(id_), State.GENERATING)

    def judging(self, id_: int) -> None:
        """The group waits for nothing but rewards."""
        self._table.move(self._open(id_), State.JUDGING)

    def finished(self, group: Group) -> None:
        """The group is complete, judged, and to be trained."""
        slot = self._open(group.id)
        if group.admitted_at != slot.version:
            raise ControlError(
                f"group {group.id} was admitted at version {slot.version}, not at {group.admitted_at}"
            )
        slot.group = group
        self._table.move(slot, State.READY)
        self.accepted += 1

    def filtered(self, id_: int) -> None:
        """The group is complete and will not be trained."""
        self._lose(self._open(id_), Loss.FILTERED)

    def failed(self, id_: int) -> None:
        """The group could not be generated or judged."""
        self._lose(self._open(id_), Loss.FAILED)

    def is_open(self, id_: int) -> bool:
        """Whether work on the group is wanted: False once it has ended, be it because it has expired."""
        slot = self._table.get(id_)
        return slot is not None and slot.state in OPEN

    # ---- training

    def take_batch(self) -> list[Group] | None:
        """The next ``batch_size`` groups, oldest first, or None while the policy wants to wait.

        Groups that expire on the way are given by ``take_expired``.
        """
        if self._training:
            raise ControlError("the batch before this one has not been published")
        due = Due(self.batch_size, self.bound, self.version, self._surplus)
        if not self.consumption.complete(self._table, due):
            return None
        if self.consumption.on_stale not in (None, OnStale.TRAIN):
            self._treat_stale(self.consumption.on_stale)
            if not self.consumption.complete(self._table, due):
                return None
        self._training = [self._table.take_oldest_ready() for _ in range(self.batch_size)]
        return [slot.group for slot in self._training if slot.group is not None]

    def published(self, version: int) -> None:
        """The version trained on the batch is served by every engine; its slots are free."""
        if version != self.version + 1:
            raise ControlError(f"version {version} cannot follow {self.version}")
        if not self._training:
            raise ControlError(f"version {version} was trained on no batch of this run")
        for slot in self._training:
            self._table.remove(slot)
        self.counts.trained += len(self._training)
        self._training = []
        self.version = version
        self.step += 1
        if self.consumption.on_stale is None:
            self._give_up_overdue()

    def take_expired(self) -> list[Expired]:
        """The groups that have expired since the last call."""
        expired, self._expired = self._expired, []
        return expired

    def _give_up_overdue(self) -> None:
        """Over-sampled groups whose deadline has passed. By the proof there are no others."""
        oldest = self.version - self.bound
        if min(self._table.waiting, default=oldest) < oldest:
            for slot in [slot for slot in self._table if slot.version < oldest]:
                self._expire(slot, Loss.SURPLUS)

    def _treat_stale(self, on_stale: OnStale) -> None:
        """Look at the groups that would be the next batch, until all of them are within the bound."""
        oldest = self.version - self.bound
        for slot in self._table.oldest_ready_slots(self.batch_size, lambda slot: self._is_late(slot, oldest)):
            group = slot.group
            assert group is not None
            kept = tuple(trajectory.masked_before(oldest) for trajectory in group.trajectories)
            if on_stale is OnStale.MASK and any(trajectory.response_length for trajectory in kept):
                slot.group = replace(group, trajectories=kept)
            elif on_stale is OnStale.REQUEUE and slot.requeues < REQUEUES:
                self._requeued.append((slot.id, slot.requeues + 1))
                self._expire(slot, Loss.REQUEUED)
            else:
                self._expire(slot, Loss.STALE)

    # ---- restart

    def restore_open(self, id_: int, version: int) -> Ticket | None:
        """Go on with a group of which a part has survived, its oldest token of ``version``.

        Call this and ``restore_ready`` in the order of versions, before anything is admitted. None: it could
        not be trained within the bound any more, and must be generated again (``restore_unstarted``).
        """
        if not self._has_room_for(self.version if self._may_train_parts else version):
            return None
        self._table.add(id_, version)
        return Ticket(id_, version)

    def restore_ready(self, group: Group) -> bool:
        """Keep a finished group. False: it is too old by now, as for ``restore_open``."""
        runs = (run for trajectory in group.trajectories for run in trajectory.runs)
        newest = max((version for version, trained, _ in runs if trained), default=group.admitted_at)
        if not self._has_room_for(newest if self._may_train_parts else group.admitted_at):
            return False
        self._table.add(group.id, group.admitted_at)
        self.finished(group)
        return True

    def restore_unstarted(self, id_: int) -> None:
        """Admit the group anew, as soon as there is a slot."""
        self._unstarted.append(id_)

    def _has_room_for(self, version: int) -> bool:
        """Whether the steps until tokens of ``version`` are too old have room for one more group.

        What has been restored before is older, and is trained before.
        """
        steps = version + self.bound - self.version + 1
        return len(self._table) < steps * self.batch_size

    @property
    def _may_train_parts(self) -> bool:
        """Whether a group may be trained although some of its tokens are too old to be."""
        return self.consumption.on_stale in (OnStale.MASK, OnStale.TRAIN)

    # ----

    def _is_late(self, slot: Slot, oldest: int) -> bool:
        """Whether tokens of the ready group are outside the bound."""
        if slot.version >= oldest or slot.group is None:
            return False
        return any(t.response_length and t.oldest_version < oldest for t in slot.group.trajectories)

    def _open(self, id_: int) -> Slot:
        slot = self._table.get(id_)
        if slot is None or slot.state not in OPEN:
            raise ControlError(f"group {id_} is not being generated or judged")
        return slot

    def _expire(self, slot: Slot, loss: Loss) -> None:
        self._expired.append(Expired(slot.id, loss, slot.group))
        self._lose(slot, loss)

    def _lose(self, slot: Slot, loss: Loss) -> None:
        if slot.state is State.READY:
            self.accepted -= 1
        self._table.remove(slot)
        self.losses[loss] += 1
        end = loss.end
        setattr(self.counts, end.value, getattr(self.counts, end.value) + 1)
