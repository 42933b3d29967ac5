"""Decides which groups may start and which are trained, so that no trained token's lag exceeds the bound.

A pure state machine: no clock, no I/O, no tasks. Callers push events in and read decisions out. The core
knows a group by its number, and its tokens by their policy versions.

    admit() -> ADMITTED -> GENERATING <-> JUDGING -> READY --take_batch--> TRAINING --published--> trained
                  |                                  |   ^                    |
                  +---- failed, filtered             |   +----- give_back ----+
                                                     +---- expired: too old, or one more than needed
                                                     +---- failed: quarantined

``admit`` gives a slot to a group. The slot becomes free when the group is filtered, has failed or has
expired; otherwise only when the version that was trained on the group is *published*. Until then the engines
still serve the old version, and a group admitted in its place would start one version too early.

Lag and standing
----------------

Let c be the version that the trainer holds, and t the number of updates that led to it: training step t
starts from c. The engines serve c as well, unless the trainer has died and was restored from an older version
(see below). The lag of a token of version v is the number of updates on the path between v and c in the tree
of versions. Its *standing* is t - lag. Let d(v) count the updates that led to v, and let a be the last common
ancestor of v and c. The path leads from v up to a and from there down to c:

    lag = d(v) - d(a) + t - d(a)        standing = 2 * d(a) - d(v)

- As long as no restart makes a branch, v is an ancestor of c: a = v, and the standing is d(v).
- No standing is above t: from d(a) <= d(v) and d(a) <= t follows 2 * d(a) - d(v) <= d(a) <= t. Descendants of
  c are no exception. After a restart from c, tokens of an abandoned branch that went on from c have a = c and
  a standing of 2 * t - d(v) < t: as far below t as v lies beyond c.
- A standing never changes while the run goes on. The next version is a child of c that is begun after v, so
  that v is not among its descendants: a remains the last common ancestor.
- One version has no standing yet: the one that the step is making. Engines take it one after the other,
  before ``published`` says so. Published, it has the standing t + 1; given back, it is a dead branch of c and
  has the standing 2 * t - (t + 1) = t - 1. The core counts its tokens only when this is decided.
- A copy of c (``begin_copy``) is no update away from c: it has the standing t, and so has every other version
  the one that it had before. Published, the copy takes the place of c, and t remains.

The standing of a group is the smallest that its tokens have or can get: t at admission, because engines serve
version c or its descendants on the present line from then on, or that of ``served``; for a group that a
restart admits again, the smallest standing of its tokens. Should a finished group turn out to have a token
of a smaller standing, such as a token of a version that was given back, its standing is lowered.

Proof that no lag exceeds the bound
-----------------------------------

B is the batch size and eta the bound. A group is *overdue* at step t if its standing is below t - eta. Groups
become overdue only where t grows or a standing is lowered. The core gives up overdue groups at both places,
so that every token of a batch has a standing of t - eta or more: a lag of at most eta. ``ReadyFirst`` keeps
overdue groups instead, and each of their tokens is looked at when a batch is taken (``OnStale``).

Proof that nothing is given up without need
-------------------------------------------

A group *waits* while it holds a slot and is not in training. W(s) is the number of waiting groups of standing
s or less. Admission is by ``Slots``, without over-sampling: a group is admitted only while fewer than
(eta + 1) * B slots are held.

Claim. When step t takes its batch, W(s) <= B * (s + eta + 1 - t) for every s from t - eta - 1 to t.

For s = t - eta - 1 the claim is W(s) <= 0: no waiting group is overdue, and none is given up.

Proof by induction over the events of a run. In the beginning nothing waits, and no right-hand side is
negative. The claim for step t holds until step t takes its batch, because

1. an admission at step t adds a group of standing t, which changes W(t) only. Nothing is in training, so that
   all held slots wait: W(t) <= (eta + 1) * B, which is the claim for s = t;
2. a group that is filtered, has failed or has expired makes no W larger.

The batch turns the claim for step t into the claim for step t + 1:

3. Consumption. A policy takes B ready groups only if W(s) <= B * (s + eta - t) afterwards, for s from t - eta
   to t: the claim for step t + 1 and these s. ``Fifo`` takes the B oldest groups, which ensures it: if at
   least B groups of standing s or less wait, all B taken are among them, and W(s) becomes smaller by B; if
   fewer wait, none is left, and the right-hand side is not negative. ``Windowed`` checks it for each s,
   unless the batch takes as many groups of standing s or less as the B oldest groups would.
4. An admission while the batch trains changes W(t) only. The batch holds B of at most (eta + 1) * B slots, so
   that W(t) <= eta * B: the claim for step t + 1 and s = t.
5. Publication frees slots of groups that did not wait. No group of standing t + 1 exists yet:
   W(t + 1) = W(t) <= eta * B, so that the claim for step t + 1 holds for s = t + 1, too.
6. A batch that is given back waits again. Then W is what it was before the batch, apart from admissions since
   then. These have changed W(t) only, and nothing is in training, as in 1: the claim for step t.

A restart admits groups of smaller standings again, in ascending order, each only while
B * (s + eta + 1 - t) allows for it (``restore_open``, ``restore_ready``): the claim holds when the run goes
on.

Three things may make a W larger than the claim allows. Groups are then given up once they are overdue, and
never trained.

- Over-sampling by S groups adds S to every right-hand side. Up to S groups may miss their deadline.
- Withheld groups neither wait nor hold a slot: the proof is about all other groups. They wait again when they
  are no longer withheld, which adds their number to the left-hand sides. While withheld, they may be overdue.
- A lowered standing adds a group to one W.

Nobody waits forever. No policy refuses a batch of the B oldest groups once these are ready, and every episode
ends, by its time limit at the latest. A reserve leaves at least B slots, enough for a batch, and withheld
groups hold no slot.

While the engines serve another version
---------------------------------------

A trainer that has died is restored from version c, while the engines go on with the version u that was
published last: ``served``. Numbers never go back, so that a copy of c is published before a batch is taken.
Until then each new token is of version u, whose lag k is the number of updates that are lost. Its standing is
t - k, and does not change either.

- If k > eta, no new token could be trained. Nothing is admitted, and no group that is restored may be given
  to an engine (``may_generate``).
- Otherwise a group that an engine works on has a standing of at most t - k. Ready groups that were restored
  may have larger ones, but are trained before a group that is admitted now, because they are older. For the
  proof, let a group count under the standing with which a younger one was admitted, if that is smaller. Then
  an admission makes W(s) the number of all waiting groups, for every s from t - k to t. The smallest of these
  right-hand sides is B * (eta + 1 - k): a group is admitted only while fewer slots are held (``_room``). This
  takes the place of 1. In 3, ``Windowed`` looks at the standings themselves. Only ready groups count under
  smaller ones, and batches take these first: a batch that leaves one of them takes B groups that count under
  t - k or less, and for one that leaves none there is no difference.

The copy waits for nobody. Once it is published, the engines serve what the trainer holds, no standing has
changed, and the proof goes on as it is.

``ReadyFirst`` promises less: groups may be older, and their tokens with a lag above eta are not trained. But
a group that became ready at step w is trained at step w + eta or before. Every step that does not train it
trains B groups that were admitted before it, and that held slots when it became ready. Together with the
group these are at most (eta + 1) * B slots, or eta * B if step w had its batch already: the group is in the
batch of one of the steps w to w + eta. So its last tokens are trained if they are of standing w, that is, if
its reward arrives before the next version. (Without over-sampling, and if nothing is withheld.)

Turns of live users
-------------------

Turns come in by a door of their own (``live``). B counts groups only: a batch consists of exactly B groups
and of up to ``live_trajectories`` trajectories of turns besides. What is proved above holds with any turns:

- A turn holds no slot and counts in no W. No event of a turn changes the right or the order of any group, so
  that an admission is as free, and a batch of groups as complete, as without turns.
- Waiting for turns puts off the moment at which step t takes its batch, and the claim for step t holds until
  then: the only events meanwhile are those of 1 and 2. The wait ends by turns that become ready, or by
  ``turns_wait_is_over``, an event from outside: the core has no clock. Then the batch has fewer turns, or
  none. So a step without a batch waits for groups, which come as proved, or for one event.
- Without prompts (B = 0) a batch holds turns alone. It waits without an end only while no turn is ready, when
  there is nothing to train.

No lag of a turn's token exceeds the bound, because each token is looked at when the batch is taken. No
version is in the making then, so that every token has a standing. A turn without a token within the bound
has expired before: where t grows, or a standing is decided, every turn is given up whose largest standing is
below t - eta. So each turn in a batch has a token that carries loss.

No token of a turn carries loss twice on one line of versions: a turn is in one trajectory of a batch, it is
ready again only if its batch is given back, and it ends when the version is published.

    >>> control = RolloutControl(batch_size=1, bound=0)
    >>> ticket = control.admit()
    >>> control.may_admit()          # synchronous: the next group waits for version 1
    False
    >>> control.finished(ticket.id, versions=[0])
    >>> control.take_batch()
    {0: frozenset()}
    >>> control.published(control.begin_step())
    >>> control.may_admit(), control.version
    (True, 1)
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from slipstream.rollout.control.admission import AdmissionPolicy, by_slots
from slipstream.rollout.control.consumption import ConsumptionPolicy, Due, Fifo, OnStale
from slipstream.rollout.control.ends import GroupCounts, Loss
from slipstream.rollout.control.live_door import LiveDoor, TurnEnd
from slipstream.rollout.control.slots import OPEN, Slot, SlotTable, State
from slipstream.rollout.control.versions import ControlError, VersionTree

REQUEUES = 3
"""Largest number of times that a prompt is requeued. A prompt whose completions always take longer than the
bound would otherwise hold a slot for the rest of the run."""


@dataclass(frozen=True)
class Ticket:
    """Permission to generate one group."""

    id: int
    """Admission number over the life of the run, from 0. A group that a restart admits again keeps it."""
    version: int
    """Policy version served at admission, or the one with the largest lag among the tokens that a restart has
    restored. No token of the group lags more, unless it is of a version that was never published."""
    requeued_from: int | None = None
    """Expired group whose prompt this group takes over."""


@dataclass
class RolloutControl:
    """Admission and consumption of groups. The module describes their lifecycle and proves the bound.

    Raises UnknownVersion where a policy version is named that is not in ``versions``.
    """

    batch_size: int
    """Groups in a batch; 0 without a prompt set."""
    bound: int
    """``rollout.max_head_offpolicyness``."""
    admission: AdmissionPolicy = by_slots
    consumption: ConsumptionPolicy = field(default_factory=Fifo)
    over_sampling: float = 1.0
    """Groups admitted per group that a batch needs. Groups that no batch needed in time are given up."""
    versions: VersionTree = field(default_factory=VersionTree)
    """All versions of the run; ``begin_step`` and ``begin_copy`` add to them."""
    version: int = 0
    """Version that the trainer holds, from which the next training step starts."""
    served: int | None = None
    """Version that every serving engine has, if it is another one: the trainer was restored from ``version``,
    and no copy of it (``begin_copy``) has been published yet."""
    last_step: int | None = None
    """Training steps of the run. No group is admitted that could not be trained by then."""
    counts: GroupCounts = field(default_factory=GroupCounts)
    losses: Counter[Loss] = field(default_factory=Counter[Loss])
    accepted: int = 0
    """Groups that are ready and not withheld, in training or trained; ``by_volume`` counts them."""
    live_trajectories: int = 0
    """Trajectories of turns that a full batch has besides its groups."""
    step: int = field(init=False)
    """Number of training steps that led to ``version``."""
    live: LiveDoor = field(init=False)
    """The door for the turns of live users."""
    lacks_turns: bool = field(init=False, default=False)
    """True if the last ``take_batch`` lacked nothing but turns: ``turns_wait_is_over`` lets it go on."""
    _is_wait_over: bool = False
    _begun: int | None = None
    """Version that the step in progress is making, or copy that is being published."""
    _table: SlotTable = field(default_factory=SlotTable)
    _training: list[Slot] = field(default_factory=list[Slot])
    _restored: int | None = None
    """Standing of the last group that was restored."""
    _unstarted: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    """Groups admitted before a restart, of which nothing is left that could be continued, and how often the
    prompt of each was requeued."""
    _requeued: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    """Expired groups whose prompts are to be admitted again, and how often each prompt was requeued."""
    _expired: dict[int, Loss] = field(default_factory=dict[int, Loss])

    def __post_init__(self) -> None:
        self.step = self.versions.updates(self.version)
        self._surplus = int((self.over_sampling - 1) * self.batch_size + 0.5)
        reserve = self.consumption.reserve(self.batch_size, self.bound)
        self.capacity = (self.bound + 1) * self.batch_size - reserve + self._surplus
        """Number of slots."""
        self.live = LiveDoor(self, self.live_trajectories)

    @property
    def version_in_the_making(self) -> int | None:
        """Version that the step in progress is making, or copy that is being published."""
        return self._begun

    @property
    def is_training(self) -> bool:
        """True if a batch was taken and neither published nor given back."""
        return bool(self._training or self.live.training)

    def lag(self, version: int) -> int:
        """Return the lag of a token of ``version`` at a training step that starts from ``self.version``."""
        return self.versions.distance(version, self.version)

    @property
    def sampled_version(self) -> int:
        """Version of what the engines sample now: that of ``served``, or else ``version``."""
        return self.version if self.served is None else self.served

    @property
    def may_generate(self) -> bool:
        """True if what the engines sample now can be trained within the bound."""
        return self.served is None or self.lag(self.served) <= self.bound

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
        """Ready groups, withheld ones included."""
        return self.states[State.READY]

    @property
    def states(self) -> dict[State, int]:
        """Number of groups in each state; groups that have ended are not counted."""
        return self._table.states

    # ---- admission

    def may_admit(self) -> bool:
        """True if a slot is free for one more group."""
        held = len(self._table)
        if self.last_step is not None:
            needed = (self.last_step - self.step) * self.batch_size
            if held >= needed + (self._surplus if needed else 0):
                return False
        if self.served is not None and held >= self._room(self._present):
            return False
        return self.admission(self)

    def admit(self) -> Ticket:
        """Give a slot to the next group: unstarted since a restart, else of a requeued prompt, else new.

        Raises ControlError when ``may_admit`` is False.
        """
        if not self.may_admit():
            raise ControlError(f"no slot is free: {len(self._table)} groups hold a slot already")
        if self._unstarted:
            id_, requeues = self._unstarted.popleft()
            self._table.add(id_, self._present, requeues)
            return Ticket(id_, self.sampled_version)
        before, requeues = self._requeued.popleft() if self._requeued else (None, 0)
        ticket = Ticket(self.counts.admitted, self.sampled_version, before)
        self.counts.admitted += 1
        self._table.add(ticket.id, self._present, requeues)
        return ticket

    @property
    def _present(self) -> int:
        """Standing of the tokens that the engines sample now."""
        return self.step if self.served is None else self._standing([self.served])

    def _room(self, standing: int) -> int:
        """Return how many groups are trained before a group of ``standing`` is overdue, from this step on."""
        return self.batch_size * (standing + self.bound + 1 - self.step)

    # ---- events of one group

    def generating(self, id_: int) -> None:
        """Record that a completion of the group is being asked for."""
        self._table.move(self._open(id_), State.GENERATING)

    def judging(self, id_: int) -> None:
        """Record that the group waits for nothing but rewards."""
        self._table.move(self._open(id_), State.JUDGING)

    def finished(self, id_: int, versions: Collection[int]) -> None:
        """Record that the group is complete and judged, and is to be trained.

        ``versions`` are those of its tokens that carry loss. A group with a token that is too old already
        expires.
        """
        self._make_ready(self._open(id_), frozenset(versions))

    def filtered(self, id_: int) -> None:
        """Record that the group is complete and is not to be trained; its slot becomes free."""
        self._lose(self._open(id_), Loss.FILTERED)

    def failed(self, id_: int) -> None:
        """Record that the group could not be generated or judged; its slot becomes free."""
        self._lose(self._open(id_), Loss.FAILED)

    def is_open(self, id_: int) -> bool:
        """True if work on the group must go on: False once it is ready or has ended."""
        slot = self._table.get(id_)
        return slot is not None and slot.state in OPEN

    # ---- training

    def take_batch(self) -> dict[int, frozenset[int]] | None:
        """Return the next ``batch_size`` groups, oldest first, or None while the policy waits, or for turns.

        Each has the policy versions whose tokens must not carry loss, because their lag exceeds the bound.

        The turns of the batch are in ``live.training``. Groups may expire on the way: see ``take_expired``.
        """
        if self.is_training:
            raise ControlError("the batch before was neither published nor given back")
        if self.served is not None:
            raise ControlError(
                f"the engines serve version {self.served}: publish a copy of version {self.version} first"
            )
        self.lacks_turns = False
        if not self._groups_are_complete() or not self._turns_are_complete():
            return None
        self.live.take()
        self._training = [self._table.take_oldest_ready() for _ in range(self.batch_size)]
        if self.consumption.on_stale is not OnStale.MASK:
            return {slot.id: frozenset() for slot in self._training}
        return {slot.id: self._stale(slot) for slot in self._training}

    def _groups_are_complete(self) -> bool:
        due = Due(self.batch_size, self.bound, self.step, self._surplus)
        if not self.consumption.complete(self._table, due):
            return False
        if self.consumption.on_stale in (None, OnStale.TRAIN):
            return True
        self._treat_stale(self.consumption.on_stale)
        return self.consumption.complete(self._table, due)

    def _turns_are_complete(self) -> bool:
        """True if there are turns enough for the batch, or as many as it has to do with."""
        available = self.live.available
        if not self.batch_size and not available:
            self._is_wait_over = False
            return False
        self.lacks_turns = available < self.live_trajectories and not self._is_wait_over
        if not self.lacks_turns:
            self._is_wait_over = False
        return not self.lacks_turns

    def turns_wait_is_over(self) -> None:
        """Allow the batch, if it lacks only turns, to be taken with the turns that are ready."""
        self._is_wait_over = self.lacks_turns

    def begin_step(self) -> int:
        """Take the number of the version that the step makes from the batch, and return it.

        Call it once for each batch, before any engine can have this version.
        """
        if not self.is_training:
            raise ControlError("no batch is in training, so that no version can be made of it")
        if self._begun is not None:
            raise ControlError(f"the step has begun already: it makes version {self._begun}")
        self._begun = self.versions.begin(self.version)
        return self._begun

    def begin_copy(self) -> int:
        """Take the number of a copy of ``version``, and return it.

        Call it while the engines serve another version, before any engine can have the copy. ``published``
        follows. If publishing the copy fails, the run goes on with another core.
        """
        if self.served is None:
            raise ControlError(f"the engines serve version {self.version} already")
        if self._begun is not None:
            raise ControlError(f"version {self._begun} is in the making already")
        self._begun = self.versions.begin(self.version, is_copy=True)
        return self._begun

    def published(self, version: int) -> None:
        """Record that every serving engine has the version that was begun; free the slots of its batch."""
        if version != self._begun:
            making = "no version was begun" if self._begun is None else f"version {self._begun} was begun"
            raise ControlError(f"version {version} cannot follow version {self.version}: {making}")
        for slot in self._training:
            self._table.remove(slot)
        self.counts.trained += len(self._training)
        self._training, self._begun = [], None
        self.version, self.step = version, self.versions.updates(version)
        self.served = None
        self._give_up_overdue()
        self.live.published()

    def give_back(self) -> None:
        """Record that the batch is not trained: its groups and turns are ready again, in their old order.

        The number that ``begin_step`` has taken is never used again.
        """
        if not self.is_training:
            raise ControlError("no batch is in training that could be given back")
        self._return_batch()
        self._give_up_overdue()

    def withhold(self, ids: Collection[int]) -> None:
        """Leave out these ready groups and turns when a batch is taken, and no others, until the next call.

        Withheld groups hold no slot, so that other groups can take their place in the batch. They may expire
        meanwhile. Groups that have ended are ignored; one that is not ready is refused. Turns have numbers
        below 0.
        """
        self.live.withhold([id_ for id_ in ids if id_ < 0])
        slots = [slot for id_ in dict.fromkeys(ids) if (slot := self._table.get(id_)) is not None]
        if refused := [slot for slot in slots if slot.state is not State.READY]:
            states = ", ".join(f"group {slot.id} is {slot.state}" for slot in refused)
            raise ControlError(f"only ready groups can be withheld, but {states}")
        self.accepted += len(self._table.withheld) - len(slots)
        self._table.withhold(slots)

    def quarantine(self, id_: int) -> None:
        """Give up a group or a turn, ready or in training, that kills the trainer.

        A batch in training is given back first.
        """
        if id_ < 0:
            self._return_batch()
            if not self.live.ended(id_, TurnEnd.FAILED):
                raise ControlError(f"turn {id_} has ended, or never arrived")
            self._give_up_overdue()
            return
        slot = self._table.get(id_)
        if slot is None or slot.state in OPEN:
            raise ControlError(f"group {id_} is neither ready nor in training")
        self._return_batch()
        self._lose(slot, Loss.QUARANTINED)
        self._give_up_overdue()

    def take_expired(self) -> dict[int, Loss]:
        """Return the groups that have expired since the last call. The caller cancels what is still being
        generated for them.
        """
        expired, self._expired = self._expired, {}
        return expired

    def _return_batch(self) -> None:
        self._table.give_back(self._training)
        begun, self._training, self._begun = self._begun, [], None
        for slot in [*self._table, *self._table.withheld.values()]:
            if begun in slot.versions:
                self._table.lower(slot, min(slot.standing, self._standing(slot.versions)))
        self.live.given_back()

    # ---- restart

    def restore_open(self, id_: int, versions: Collection[int], requeues: int = 0) -> Ticket | None:
        """Admit a group again of which a part has survived a restart.

        ``versions`` are those of its tokens that carry loss or may do so. ``requeues``: number of times that
        its prompt was requeued. Call this and ``restore_ready`` in the order of the groups' largest lags, the
        largest first, before anything else is admitted. Return None when the group can no longer be trained
        within the bound: it must then be generated again (``restore_unstarted``).

        Its next tokens are of the version that the engines serve, which therefore is among ``versions`` if it
        can be trained: see ``may_have``.
        """
        oldest = max(versions, key=self.lag, default=self.version)
        if self._restore(id_, versions, self._present if self.may_generate else self.step, requeues) is None:
            return None
        return Ticket(id_, oldest)

    def may_have(self, versions: Collection[int]) -> frozenset[int]:
        """Return the versions of the tokens that an unfinished group has or can have, given those it has.

        A group that no engine may work on before the copy is published gets no token of ``served``.
        """
        ahead = frozenset[int]() if self.served is None or not self.may_generate else {self.served}
        return frozenset(versions) | ahead

    def restore_ready(self, id_: int, versions: Collection[int], requeues: int = 0) -> bool:
        """Admit a finished group again, ready to be trained. Return False when it is too old by now.

        ``versions`` are those of its tokens that carry loss. For ``requeues`` and for the order of calls see
        ``restore_open``.
        """
        newest = self.step - min(map(self.lag, versions), default=0)
        slot = self._restore(id_, versions, newest, requeues)
        if slot is not None:
            self._make_ready(slot, frozenset(versions))
        return slot is not None

    def restore_unstarted(self, id_: int, requeues: int = 0) -> None:
        """Let ``admit`` give the next free slot to this group, which is generated from its prompt again.

        ``requeues``: number of times that its prompt was requeued.
        """
        self._unstarted.append((id_, requeues))

    def restore_requeued(self, id_: int, requeues: int) -> None:
        """Let ``admit`` give a slot to the prompt of this expired group, which no group has replaced yet.

        ``requeues``: number of times that the prompt was requeued, this time included.
        """
        self._requeued.append((id_, requeues))

    def _restore(self, id_: int, versions: Collection[int], newest: int, requeues: int) -> Slot | None:
        """Admit a group if the steps until its deadline have room for one more group.

        All groups restored so far are older, and are trained before. ``newest`` is the largest standing that
        a token of the group has or can get.
        """
        standing = self._standing(versions)
        if self._restored is not None and standing < self._restored:
            raise ControlError(
                f"group {id_} with a lag of {self.step - standing} was restored after a group with a lag of "
                f"{self.step - self._restored}: restore groups in the order of their lags, the largest first"
            )
        self._restored = standing
        may_train_parts = self.consumption.on_stale in (OnStale.MASK, OnStale.TRAIN)
        if len(self._table) >= self._room(newest if may_train_parts else standing):
            return None
        return self._table.add(id_, standing, requeues)

    # ---- groups beyond the bound

    def _standing(self, versions: Collection[int]) -> int:
        """Return the smallest standing of ``versions``, without the one that the step is making."""
        lags = (self.lag(version) for version in versions if version != self._begun)
        return self.step - max(lags, default=0)

    def _give_up_overdue(self) -> None:
        """Give up the overdue groups, unless the policy looks at their tokens when it takes a batch."""
        if self.consumption.on_stale is not None:
            return
        oldest = self.step - self.bound
        overdue = [slot for slot in self._table.withheld.values() if slot.standing < oldest]
        if min(self._table.waiting, default=oldest) < oldest:
            overdue += [slot for slot in self._table if slot.standing < oldest]
        for slot in overdue:
            self._expire(slot, Loss.SURPLUS if self._surplus and not slot.is_withheld else Loss.STALE)

    def _treat_stale(self, on_stale: OnStale) -> None:
        """Requeue or drop groups until the whole next batch may be trained, parts of it masked."""
        for slot in self._table.oldest_ready_slots(self.batch_size, lambda slot: bool(self._stale(slot))):
            if on_stale is OnStale.MASK and self._stale(slot) != slot.versions:
                continue
            if on_stale is OnStale.REQUEUE and slot.requeues < REQUEUES:
                self._requeued.append((slot.id, slot.requeues + 1))
                self._expire(slot, Loss.REQUEUED)
            else:
                self._expire(slot, Loss.STALE)

    def _stale(self, slot: Slot) -> frozenset[int]:
        """Return the versions of the ready group whose tokens are too old."""
        if slot.standing >= self.step - self.bound:
            return frozenset()
        return frozenset(version for version in slot.versions if self.lag(version) > self.bound)

    # ---- ends

    def _open(self, id_: int) -> Slot:
        slot = self._table.get(id_)
        if slot is None or slot.state not in OPEN:
            raise ControlError(f"group {id_} is not being generated or judged")
        return slot

    def _make_ready(self, slot: Slot, versions: frozenset[int]) -> None:
        standing = self._standing(versions)
        slot.versions = versions
        self._table.move(slot, State.READY)
        self.accepted += 1
        if standing < slot.standing:
            self._table.lower(slot, standing)
            self._give_up_overdue()

    def _expire(self, slot: Slot, loss: Loss) -> None:
        self._expired[slot.id] = loss
        self._lose(slot, loss)

    def _lose(self, slot: Slot, loss: Loss) -> None:
        if slot.state is State.READY and not slot.is_withheld:
            self.accepted -= 1
        self._table.remove(slot)
        self.losses[loss] += 1
        end = loss.end
        setattr(self.counts, end.value, getattr(self.counts, end.value) + 1)
