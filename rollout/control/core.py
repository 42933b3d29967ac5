"""Decides which groups may start and which are trained, so that no trained token's lag exceeds the bound.

A pure state machine: no clock, no I/O, no tasks. Callers push events in and read decisions out.

    admit() -> ADMITTED -> GENERATING <-> JUDGING -> READY --take_batch--> TRAINING --published--> trained
                  |                                    |
                  +---- failed, filtered               +---- expired: too old, or one more than needed

``admit`` gives a slot to a group. The slot becomes free when the group is filtered, has failed or has
expired; otherwise only when the version that was trained on the group is *published*. Until then the engines
still serve the old version, and a group admitted in its place would start one version too early.

Proof that no lag exceeds the bound
-----------------------------------

Definitions. B is the batch size and eta the bound. Step t starts from version t and makes version t + 1.
The version of a group is the published version at its admission; engines serve this version or a later
one from then on, so that no token of the group is older. A group *waits* while it holds a slot and is not in
training. W(v) is the number of waiting groups of version v or older. Admission is by ``Slots``, without
over-sampling: a group is admitted only while fewer than (eta + 1) * B slots are held.

Claim. When step t takes its batch, W(v) <= B * (v + eta + 1 - t) for every v from t - eta - 1 to t.

For v = t - eta - 1 the claim is W(v) <= 0: every waiting group is of version t - eta or later. So every
token of the batch of step t is, too, and its lag is at most eta.

Proof by induction over the events of a run. In the beginning nothing waits, and no right-hand side is
negative. The claim for step t holds until step t takes its batch, because

1. an admission at version t adds a group of version t, which changes W(t) only. Nothing is in training, so
   that all held slots wait: W(t) <= (eta + 1) * B, which is the claim for v = t;
2. a group that is filtered, has failed or has expired makes no W larger.

The batch turns the claim for step t into the claim for step t + 1:

3. Consumption. A policy takes B ready groups only if W(v) <= B * (v + eta - t) afterwards, for v from t - eta
   to t: the claim for step t + 1 and these v. ``Windowed`` checks this. ``Fifo`` takes the B oldest groups,
   which ensures it: if at least B groups of version v or older wait, all B taken are among them, and W(v)
   becomes smaller by B; if fewer wait, none is left, and the right-hand side is not negative.
4. An admission while the batch trains, still at version t, changes W(t) only. The batch holds B of at most
   (eta + 1) * B slots, so that W(t) <= eta * B: the claim for step t + 1 and v = t.
5. Publication of version t + 1 frees slots of groups that did not wait. No group of version t + 1 exists
   yet: W(t + 1) = W(t) <= eta * B, so that the claim for step t + 1 holds for v = t + 1, too.

Over-sampling by S groups adds S to every right-hand side. Then up to S groups may still wait at the
publication after their deadline; ``published`` gives them up, so that none of them is ever trained.

A restart admits groups of older versions again, oldest first, each only while B * (v + eta + 1 - t) allows
for it (``restore_open``, ``restore_ready``): the claim holds when the run goes on.

Nobody waits forever. By 3, no policy refuses a batch of the B oldest groups once these are ready, and every
episode ends, by its time limit at the latest. A reserve leaves at least B slots, enough for a batch.

``ReadyFirst`` promises less: groups may be older, and their tokens with a lag above eta are not trained
(``OnStale``). But a group that became ready at version w is trained at step w + eta or before. Every step
that does not train it trains B groups that were admitted before it, and that held slots when it became
ready. Together with the group these are at most (eta + 1) * B slots, or eta * B if step w had its batch
already: the group is in the batch of one of the steps w to w + eta. So its last tokens are trained if they
are of version w, that is, if its reward arrives before the next version. (Without over-sampling.)

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
"""Largest number of times that a prompt is requeued. A prompt whose completions always take longer than the
bound would otherwise hold a slot for the rest of the run."""


class ControlError(RuntimeError):
    """An event is impossible in the present state: a bug in the caller, never bad input."""


class Loss(StrEnum):
    """Reason why a group was never trained."""

    FILTERED = "filtered"
    FAILED = "failed"
    STALE = "stale"
    """Expired: no token is left within the bound, or `on_stale: drop`."""
    REQUEUED = "requeued"
    """Expired: `on_stale: requeue`; its prompt is admitted again."""
    SURPLUS = "surplus"
    """Expired: over-sampled, and its deadline has passed."""

    @property
    def end(self) -> State:
        """State in which a group ends for this reason."""
        return {Loss.FILTERED: State.FILTERED, Loss.FAILED: State.FAILED}.get(self, State.EXPIRED)


@dataclass(frozen=True)
class Ticket:
    """Permission to generate one group."""

    id: int
    """Admission number over the life of the run, from 0. A group that a restart admits again keeps it."""
    version: int
    """Published version at admission."""
    requeued_from: int | None = None
    """Expired group whose prompt this group takes over."""


@dataclass(frozen=True)
class Expired:
    """A group that the core has given up. The caller cancels what is still being generated for it."""

    id: int
    loss: Loss
    group: Group | None
    """The trajectories of the group, if it was ready."""


@dataclass
class GroupCounts:
    """Number of groups admitted, and of groups that reached each end."""

    admitted: int = 0
    trained: int = 0
    filtered: int = 0
    expired: int = 0
    failed: int = 0

    @property
    def in_flight(self) -> int:
        """Groups that have not ended."""
        return self.admitted - self.trained - self.filtered - self.expired - self.failed


@dataclass
class RolloutControl:
    """Admission and consumption of groups. The module describes their lifecycle and proves the bound."""

    batch_size: int
    bound: int
    """``rollout.max_head_offpolicyness``."""
    admission: AdmissionPolicy = field(default_factory=Slots)
    consumption: ConsumptionPolicy = field(default_factory=Fifo)
    over_sampling: float = 1.0
    """Groups admitted per group that a batch needs. Groups that no batch needed in time are given up."""
    version: int = 0
    """Version that every serving engine has."""
    step: int = 0
    """Training steps behind ``version``."""
    last_step: int | None = None
    """Training steps of the run. No group is admitted that could not be trained by then."""
    counts: GroupCounts = field(default_factory=GroupCounts)
    losses: Counter[Loss] = field(default_factory=Counter[Loss])
    accepted: int = 0
    """Groups that are ready, in training or trained; ``VolumeGate`` counts them."""
    _table: SlotTable = field(default_factory=SlotTable)
    _training: list[Slot] = field(default_factory=list[Slot])
    _unstarted: deque[int] = field(default_factory=deque[int])
    """Groups admitted before a restart, of which nothing is left that could be continued."""
    _requeued: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    """Expired groups whose prompts are to be admitted again, and how often each prompt was requeued."""
    _expired: list[Expired] = field(default_factory=list[Expired])

    def __post_init__(self) -> None:
        self._surplus = int((self.over_sampling - 1) * self.batch_size + 0.5)
        reserve = self.consumption.reserve(self.batch_size, self.bound)
        self.capacity = (self.bound + 1) * self.batch_size - reserve + self._surplus
        """Number of slots."""

    @property
    def held(self) -> int:
        """Groups that hold a slot."""
        return len(self._table)

    @property
    def open(self) -> int:
        """Groups that are still being worked on."""
        return self._table.open

    @property
    def ready(self) -> int:
        return self.states[State.READY]

    @property
    def states(self) -> dict[State, int]:
        """Number of groups in each state; groups that have ended are not counted."""
        return self._table.states

    # ---- admission

    def may_admit(self) -> bool:
        """Return whether a slot is free for one more group."""
        held = len(self._table)
        if self.last_step is not None:
            needed = (self.last_step - self.step) * self.batch_size
            if held >= needed + (self._surplus if needed else 0):
                return False
        return self.admission.may_admit(self)

    def admit(self) -> Ticket:
        """Give a slot to the next group: unstarted since a restart, else of a requeued prompt, else new.

        Raises ControlError when ``may_admit`` is False.
        """
        if not self.may_admit():
            raise ControlError(f"no slot is free: {len(self._table)} groups hold a slot already")
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
        """Record that a completion of the group is being asked for."""
        self._table.move(self._open(id_), State.GENERATING)

    def judging(self, id_: int) -> None:
        """Record that the group waits for nothing but rewards."""
        self._table.move(self._open(id_), State.JUDGING)

    def finished(self, group: Group) -> None:
        """Record that the group is complete and judged, and shall be trained."""
        slot = self._open(group.id)
        if group.admitted_at != slot.version:
            raise ControlError(
                f"group {group.id} was admitted at version {slot.version}, not at {group.admitted_at}"
            )
        slot.group = group
        self._table.move(slot, State.READY)
        self.accepted += 1

    def filtered(self, id_: int) -> None:
        """Record that the group is complete and shall not be trained; its slot becomes free."""
        self._lose(self._open(id_), Loss.FILTERED)

    def failed(self, id_: int) -> None:
        """Record that the group could not be generated or judged; its slot becomes free."""
        self._lose(self._open(id_), Loss.FAILED)

    def is_open(self, id_: int) -> bool:
        """Return whether work on the group shall go on: False once it is ready or has ended."""
        slot = self._table.get(id_)
        return slot is not None and slot.state in OPEN

    # ---- training

    def take_batch(self) -> list[Group] | None:
        """Return the next ``batch_size`` groups, oldest first, or None while the policy waits.

        Groups may expire on the way: see ``take_expired``.
        """
        if self._training:
            raise ControlError("the version trained on the batch before has not been published")
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
        """Record that every serving engine has the version trained on the batch, and free its slots."""
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
        """Return the groups that have expired since the last call."""
        expired, self._expired = self._expired, []
        return expired

    def _give_up_overdue(self) -> None:
        """Give up groups whose deadline has passed. By the proof all of them were over-sampled."""
        oldest = self.version - self.bound
        if min(self._table.waiting, default=oldest) < oldest:
            for slot in [slot for slot in self._table if slot.version < oldest]:
                self._expire(slot, Loss.SURPLUS)

    def _treat_stale(self, on_stale: OnStale) -> None:
        """Mask, requeue or drop groups until the whole next batch is within the bound."""
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
        """Admit a group again of which a part has survived a restart; its oldest token is of ``version``.

        Call this and ``restore_ready`` in the order of versions, before anything else is admitted. Return
        None when the group can no longer be trained within the bound: it must then be generated again
        (``restore_unstarted``).
        """
        if not self._has_room_for(self.version if self._may_train_parts else version):
            return None
        self._table.add(id_, version)
        return Ticket(id_, version)

    def restore_ready(self, group: Group) -> bool:
        """Admit a finished group again, ready to be trained. Return False when it is too old by now.

        Call it in the order that ``restore_open`` requires.
        """
        runs = (run for trajectory in group.trajectories for run in trajectory.runs)
        newest = max((version for version, trained, _ in runs if trained), default=group.admitted_at)
        if not self._has_room_for(newest if self._may_train_parts else group.admitted_at):
            return False
        self._table.add(group.id, group.admitted_at)
        self.finished(group)
        return True

    def restore_unstarted(self, id_: int) -> None:
        """Let ``admit`` give the next free slot to this group, which is generated from its prompt again."""
        self._unstarted.append(id_)

    def _has_room_for(self, version: int) -> bool:
        """Return whether the steps until the deadline of ``version`` have room for one more group.

        All groups restored so far are older, and are trained before.
        """
        steps = version + self.bound - self.version + 1
        return len(self._table) < steps * self.batch_size

    @property
    def _may_train_parts(self) -> bool:
        """True if a group may be trained although some of its tokens are beyond the bound."""
        return self.consumption.on_stale in (OnStale.MASK, OnStale.TRAIN)

    # ----

    def _is_late(self, slot: Slot, oldest: int) -> bool:
        """Return whether the ready group has tokens older than ``oldest``."""
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
