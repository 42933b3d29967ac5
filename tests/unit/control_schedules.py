"""Random schedules of the control core, checked against an account of updates of their own.

A schedule is any order of events that engines, workflows, the trainer and restarts can produce. The account
shares no code with ``rollout.control.versions``. In it, each update has a number, and each policy is the set
of the updates that have made it. The lag between two policies is the number of updates in one set only.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.rollout.control.admission import AdmissionPolicy, by_slots, by_volume
from slipstream.rollout.control.consumption import ConsumptionPolicy, Fifo, OnStale, ReadyFirst, Windowed
from slipstream.rollout.control.core import REQUEUES, RolloutControl, Ticket
from slipstream.rollout.control.ends import GroupCounts, Loss
from slipstream.rollout.control.live_door import TurnEnd, TurnState
from slipstream.rollout.control.slots import State
from slipstream.rollout.control.versions import VersionTree

POLICIES: dict[str, Callable[[], ConsumptionPolicy]] = {
    "fifo": Fifo,
    "windowed 0": lambda: Windowed(0.0),
    "windowed 1/4": lambda: Windowed(0.25),
    "windowed 1/2": lambda: Windowed(0.5),
    "mask": lambda: ReadyFirst(OnStale.MASK),
    "requeue": lambda: ReadyFirst(OnStale.REQUEUE),
    "drop": lambda: ReadyFirst(OnStale.DROP),
}
ADMISSIONS: dict[str, AdmissionPolicy] = {"slots": by_slots, "volume": by_volume}

MOST_RESTARTS = 4
STEPS_TO_GO_ON = 4
"""Training steps that every run can still do after its schedule."""


class Updates:
    """The account: which updates have made each policy."""

    def __init__(self) -> None:
        self._numbers = count()
        self._made_by = {0: frozenset[int]()}

    def new_policy(self, version: int, started_from: int) -> int:
        """Note that one more update makes ``version``, and return the number of the update."""
        assert version not in self._made_by, f"version {version} was begun twice"
        assert version > max(self._made_by), f"version {version} does not count up"
        update = next(self._numbers)
        self._made_by[version] = self._made_by[started_from] | {update}
        return update

    def copied(self, version: int, parent: int) -> None:
        """Note that ``version`` has the weights of ``parent``."""
        assert version > max(self._made_by), f"version {version} does not count up"
        self._made_by[version] = self._made_by[parent]

    def behind(self, version: int) -> frozenset[int]:
        return self._made_by[version]

    def steps(self, version: int) -> int:
        return len(self._made_by[version])

    def between(self, a: int, b: int) -> int:
        return len(self._made_by[a] ^ self._made_by[b])

    def versions(self) -> list[int]:
        return list(self._made_by)


@dataclass
class Episodes:
    """A group, as the ledger knows it: it outlives the core that has admitted it."""

    id: int
    ticket: Ticket
    samples: list[list[int]]
    """Versions of the tokens of each trajectory; neighbours of the same version count as one token."""
    without_loss: int = 0
    """Number of trajectories, from the first one on, whose tokens carry no loss."""
    order: int = 0
    """Admission order in this life of the run."""
    was_fresh: bool = True
    """True if the last tokens that carry loss were of the newest version when the group became ready."""
    trained_by: list[int] = field(default_factory=list[int])
    """Every update that has trained the group, on whichever branch."""
    loss: Loss | None = None
    replaces: int | None = None
    """The expired group whose prompt this group has."""

    @property
    def sampled(self) -> set[int]:
        return {version for sample in self.samples for version in sample}

    @property
    def carrying_loss(self) -> set[int]:
        return {version for sample in self.samples[self.without_loss :] for version in sample}


@dataclass
class Said:
    """A turn of a live user, as the ledger knows it."""

    id: int
    before: "Said | None"
    """The turn whose tokens its prompt repeats in full."""
    versions: list[int]
    is_judged: bool = False
    trained_by: list[int] = field(default_factory=list[int])
    end: TurnEnd | None = None
    """None also for a trained turn."""

    def comes_after(self, other: "Said") -> bool:
        return self.before is not None and (self.before is other or self.before.comes_after(other))


class Schedule(RuleBasedStateMachine):
    """Any order of events. A straggler is a group that no rule happens to finish for long."""

    policy: str | None = None
    """Name in POLICIES; None: drawn."""
    admission: str | None = None
    """Name in ADMISSIONS; None: drawn."""
    live: Sequence[int] = (0, 0, 1, 3)
    """Numbers of live trajectories in a batch to draw from."""
    totals: ClassVar[Counter[str]] = Counter()
    """Numbers of events in all schedules of this process."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.policy = self.policy or data.draw(st.sampled_from([*POLICIES, "mask"]), "policy")
        gates = ["slots", "slots", "volume"]
        self.admission = self.admission or data.draw(st.sampled_from(gates), "admission")
        self.live_trajectories = data.draw(st.sampled_from(self.live), "live trajectories")
        least = 0 if self.live_trajectories else 1
        self.batch_size = data.draw(st.integers(least, 4), "batch size")
        self.eta = data.draw(st.one_of(st.integers(0, 2), st.integers(0, 4), st.integers(0, 16)), "eta")
        self.n = data.draw(st.sampled_from([1, 8]), "samples")
        self.over_sampling = data.draw(st.sampled_from([1.0, 1.0, 1.5, 2.0]), "over-sampling")
        if self.admission == "volume":
            self.over_sampling = 1.0
        self.last_step = data.draw(st.sampled_from([None, None, None, 8]), "last step")
        self.trainer_may_die = data.draw(st.booleans(), "the trainer may die")
        self.updates = Updates()
        self.published = {0}
        self.groups: dict[int, Episodes] = {}
        self.turns: dict[int, Said] = {}
        self.unstarted: set[int] = set()
        self.parents: dict[int, int] = {}
        self.copies: set[int] = set()
        self.begin_life(version=0)
        self.restarts = 0
        self.totals["examples"] += 1

    def begin_life(self, version: int, served: int | None = None) -> None:
        """``served``: version that engines which have outlived the trainer go on with."""
        ended = Counter(group.loss.end for group in self.groups.values() if group.loss is not None)
        trained = sum(self.is_trained(group, version) for group in self.groups.values())
        counts = GroupCounts(
            len(self.groups), trained, *(ended[end] for end in (State.FILTERED, State.EXPIRED, State.FAILED))
        )
        assert self.policy is not None and self.admission is not None
        self.core = RolloutControl(
            self.batch_size,
            self.eta,
            ADMISSIONS[self.admission],
            POLICIES[self.policy](),
            self.over_sampling,
            VersionTree(self.parents, self.copies),
            version,
            None if served == version else served,
            self.last_step,
            counts,
            accepted=trained,
            live_trajectories=self.live_trajectories,
        )
        self.version = version
        self.served = version if served is None else served
        self.was_behind = self.served != version
        """The engines began this life with another version than the trainer."""
        self.generating: dict[int, Episodes] = {}
        self.ready: dict[int, Episodes] = {}
        self.training: list[Episodes] = []
        self.turns_in_training: list[Said] = []
        self.withheld_turns: set[int] = set()
        self.is_training = False
        self.expired_in_this_life: set[int] = set()
        self.withheld: set[int] = set()
        self.made: tuple[int, int | None] | None = None
        """Version in the making and the number of its update, None for a copy."""
        self.is_exposed = False
        """True while some engines have the version in the making already."""
        self.is_disturbed = False
        """True once groups may expire without over-sampling: some were withheld, or tokens left the line."""
        self.orders = count()

    # ---- lags by the account

    def lag(self, version: int) -> int:
        return self.updates.between(version, self.version)

    def largest_lag(self, versions: Iterable[int]) -> int:
        return max(map(self.lag, versions), default=0)

    def is_trained(self, group: "Episodes | Said", version: int) -> bool:
        return not self.updates.behind(version).isdisjoint(group.trained_by)

    def is_starved(self) -> bool:
        """Return whether the engines serve what nobody can train, so that no group is worked on."""
        return self.lag(self.served) > self.eta

    @property
    def is_copying(self) -> bool:
        """Return whether a copy of the restored weights is being published."""
        return self.made is not None and not self.is_training

    @property
    def may_ask(self) -> bool:
        """Return whether the trainer may ask for a batch."""
        is_behind = self.served != self.version
        return not (self.is_training or is_behind) and self.core.step != self.last_step

    def is_masked(self) -> bool:
        return self.core.consumption.on_stale is OnStale.MASK

    # ---- generation

    @rule(most=st.sampled_from([1, 2, 8, 100]))
    @precondition(lambda self: self.core.may_admit())
    def admit(self, most: int) -> None:
        while most and self.core.may_admit():
            most -= 1
            ticket = self.core.admit()
            assert ticket.version == self.served
            assert self.lag(self.served) <= self.eta, "tokens that nobody can train"
            if ticket.id in self.unstarted:
                self.unstarted.remove(ticket.id)
                group = self.groups[ticket.id]
                group.ticket = ticket
                assert ticket.requeued_from is None, "the group has its prompt already"
            else:
                assert not self.unstarted, "groups from before the restart come first"
                assert ticket.id == len(self.groups), "numbers of groups count up"
                self.check_prompt(ticket)
                group = self.groups[ticket.id] = Episodes(
                    ticket.id, ticket, [[] for _ in range(self.n)], replaces=ticket.requeued_from
                )
            group.order = next(self.orders)
            self.generating[ticket.id] = group
            self.core.generating(ticket.id)
            self.totals["groups admitted while the engines serve another version"] += (
                self.served != self.version
            )

    def owed(self) -> list[int]:
        """Return the requeued groups that no group has replaced, also those from before a restart."""
        replaced = {group.replaces for group in self.groups.values()}
        return [g.id for g in self.groups.values() if g.loss is Loss.REQUEUED and g.id not in replaced]

    def requeues(self, id_: int) -> int:
        """Return the number of times that the prompt of a group was requeued before the group had it."""
        before = self.groups[id_].replaces
        return 0 if before is None else 1 + self.requeues(before)

    def check_prompt(self, ticket: Ticket) -> None:
        """No prompt is forgotten: none is drawn while a requeued one waits. None has two groups."""
        if ticket.requeued_from is None:
            assert not self.owed(), "a prompt was drawn before the requeued ones"
        else:
            assert ticket.requeued_from in self.owed(), "the prompt was not requeued, or has a group already"
            assert self.requeues(ticket.requeued_from) < REQUEUES, "a prompt was requeued too often"
            is_of_this_life = ticket.requeued_from in self.expired_in_this_life
            self.totals["prompts admitted again after a restart"] += not is_of_this_life

    def sample(self, group: Episodes, dice: random.Random) -> None:
        """Let some trajectories of the group grow, each on an engine with its own version."""
        served = [self.served] if self.made is None or not self.is_exposed else [self.served, self.made[0]]
        for tokens in group.samples:
            if not tokens or dice.random() < 0.5:
                version = dice.choice(served)
                if tokens[-1:] != [version]:
                    tokens.append(version)

    @rule(seed=st.integers(0, 1000))
    @precondition(lambda self: self.generating and not self.is_starved())
    def running_groups_sample(self, seed: int) -> None:
        dice = random.Random(seed)
        for group in self.generating.values():
            self.sample(group, dice)

    @rule(seed=st.integers(0, 1000), kept=st.sampled_from([0.0, 0.1, 0.5, 0.9]))
    @precondition(lambda self: self.generating and not self.is_starved())
    def groups_finish(self, seed: int, kept: float) -> None:
        """Finish all groups, or all but the stragglers."""
        dice = random.Random(seed)
        for group in list(self.generating.values()):
            if dice.random() >= kept:
                self.finish(group, dice)

    def finish(self, group: Episodes, dice: random.Random) -> None:
        self.sample(group, dice)
        if dice.random() < 0.1:
            group.without_loss = dice.randint(0, self.n)
        newest = {self.served} if self.made is None else {self.served, self.made[0]}
        group.was_fresh = not group.carrying_loss.isdisjoint(newest)
        self.core.judging(group.id)
        self.core.finished(group.id, group.carrying_loss)
        del self.generating[group.id]
        self.ready[group.id] = group
        self.note_expired()

    @rule(data=st.data(), end=st.sampled_from(["filtered", "failed"]))
    @precondition(lambda self: self.generating)
    def a_group_is_lost(self, data: st.DataObject, end: str) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.generating)))
        getattr(self.core, end)(id_)
        self.generating.pop(id_).loss = Loss(end)

    # ---- training

    def in_order(self, groups: Iterable[Episodes]) -> list[Episodes]:
        return sorted((g for g in groups if g.id not in self.withheld), key=lambda group: group.order)

    @rule()
    @precondition(lambda self: self.may_ask)
    def the_trainer_asks_for_a_batch(self) -> None:
        due = self.in_order([*self.generating.values(), *self.ready.values()])[: self.batch_size]
        batch = self.core.take_batch()
        self.note_expired()
        ready = self.in_order(self.ready.values())
        is_taken = (
            batch is not None or self.core.lacks_turns or (self.batch_size == 0 and not self.trainable())
        )
        if self.core.consumption.on_stale is None:
            is_complete = len(due) == self.batch_size and all(group.id in self.ready for group in due)
            # Groups that return may stand in front of others whose deadlines are sooner.
            is_complete = is_complete and not (self.was_behind and self.is_disturbed)
            assert is_taken or not is_complete, "the oldest groups are ready: nobody waits for more"
        else:
            assert is_taken == (len(ready) >= self.batch_size), "any ready groups will do"
        if batch is None and self.core.lacks_turns:
            self.check_wait()
            if not self.waits_for_turns:
                self.core.turns_wait_is_over()
                batch = self.core.take_batch()
                assert batch is not None, "a smaller batch, and no further wait"
                self.totals["batches with fewer turns"] += 1
        if batch is None:
            return
        self.is_training = True
        self.take_turns()
        taken = [self.groups[id_] for id_ in batch]
        assert taken == ready[: self.batch_size], "the oldest ready groups, oldest first"
        if isinstance(self.core.consumption, Fifo):
            assert taken == due, "admission order"
        assert len(taken) == self.batch_size
        for group, stale in zip(taken, batch.values(), strict=True):
            self.check_taken(group, stale)
            del self.ready[group.id]
        self.training = taken
        self.totals["batches"] += 1

    def check_taken(self, group: Episodes, stale: frozenset[int]) -> None:
        assert group.loss is None and not self.is_trained(group, self.version), "trained twice"
        versions = group.carrying_loss
        assert stale <= versions
        beyond = {version for version in versions if self.lag(version) > self.eta}
        assert beyond <= stale, f"trained beyond the bound: {beyond - stale}"
        assert stale <= beyond, f"fresh tokens are masked: {stale - beyond}"
        assert not stale or self.is_masked()
        assert versions > stale or not versions, "nothing is left of the group"
        self.totals["groups trained"] += 1
        self.totals["groups trained in part"] += bool(stale)
        self.totals["groups trained with tokens of another branch"] += any(
            not self.updates.behind(version) <= self.updates.behind(self.version) for version in versions
        )

    def note_expired(self) -> None:
        for turn_id, lag in self.core.live.take_expired().items():
            turn = self.turns[turn_id]
            assert turn.end is None and not self.is_trained(turn, self.version), "a turn ends once"
            assert turn not in self.turns_in_training
            assert lag == min(map(self.lag, turn.versions)) > self.eta, "expired without need"
            turn.end = TurnEnd.EXPIRED
            self.totals["turns expired"] += 1
        for id_, loss in self.core.take_expired().items():
            group = self.groups[id_]
            self.check_expired(group, loss)
            group.loss = loss
            self.expired_in_this_life.add(id_)
            self.totals["prompts requeued"] += loss is Loss.REQUEUED
            self.ready.pop(id_, None)
            self.generating.pop(id_, None)
            self.withheld.discard(id_)

    def check_expired(self, group: Episodes, loss: Loss) -> None:
        """Nothing is given up unless it has to be."""
        assert group.loss is None, "a group ends once"
        on_stale, versions = self.core.consumption.on_stale, group.carrying_loss
        if on_stale is None:
            assert self.largest_lag({group.ticket.version, *versions}) > self.eta
            assert self.over_sampling > 1 or self.is_disturbed, "given up without need"
            losses = {Loss.STALE, Loss.SURPLUS} if self.over_sampling > 1 else {Loss.STALE}
            assert loss in losses
        else:
            assert group.id in self.ready
            assert self.largest_lag(versions) > self.eta
            may_requeue = on_stale is OnStale.REQUEUE and self.requeues(group.id) < REQUEUES
            assert (loss is Loss.REQUEUED) == may_requeue, "requeued as often as allowed"
        if self.is_masked():
            assert all(self.lag(version) > self.eta for version in versions)
            is_promised = group.was_fresh and self.over_sampling == 1
            is_promised = is_promised and not self.is_disturbed and not self.was_behind
            assert not is_promised, "masking takes all of a group"

    @rule()
    @precondition(lambda self: self.is_training and self.made is None)
    def the_step_begins(self) -> None:
        version = self.core.begin_step()
        self.made = version, self.updates.new_policy(version, self.version)
        self.parents[version] = self.version

    @rule()
    @precondition(lambda self: self.served != self.version and self.made is None)
    def the_restored_weights_get_a_new_number(self) -> None:
        version = self.core.begin_copy()
        self.made = version, None
        self.updates.copied(version, self.version)
        self.parents[version] = self.version
        self.copies.add(version)
        self.totals["copies"] += 1

    @rule()
    @precondition(lambda self: self.made is not None and not self.is_exposed)
    def some_engines_take_the_new_version(self) -> None:
        self.is_exposed = True

    @rule()
    @precondition(lambda self: self.made is not None)
    def the_new_version_is_published(self) -> None:
        assert self.made is not None
        version, update = self.made
        self.core.published(version)
        self.version = self.served = version
        self.published.add(version)
        for each in [*self.training, *self.turns_in_training]:
            assert update is not None, "a copy trains nothing"
            each.trained_by.append(update)
        self.training, self.made, self.is_exposed = [], None, False
        self.turns_in_training, self.is_training = [], False
        self.note_expired()
        self.check_lags()

    def check_lags(self) -> None:
        assert self.core.step == self.updates.steps(self.version)
        for version in self.updates.versions():
            assert self.core.lag(version) == self.lag(version)

    @rule(
        seed=st.integers(0, 1000),
        kept=st.sampled_from([0.0, 0.1, 0.5]),
        end=st.sampled_from(["published", "published", "published", "given back"]),
    )
    @precondition(lambda self: self.may_ask)
    def a_whole_step(self, seed: int, kept: float, end: str) -> None:
        """Do what mostly happens, so that a schedule gets far."""
        if self.core.may_admit():
            self.admit(100)
        if not self.is_starved():
            self.groups_finish(seed, kept)
        self.the_trainer_asks_for_a_batch()
        if self.is_training:
            self.the_step_begins()
            self.some_engines_take_the_new_version()
            if not self.is_starved():
                self.running_groups_sample(seed)
            if end == "published" or not self.trainer_may_die:
                self.the_new_version_is_published()
            else:
                if not self.is_starved():
                    self.groups_finish(seed + 1, kept)
                self.the_batch_is_given_back()

    @rule(seed=st.integers(0, 1000))
    @precondition(
        lambda self: (
            self.core.consumption.on_stale is OnStale.REQUEUE
            and not self.is_training
            and self.served == self.version
        )
    )
    def stragglers_outlive_the_bound(self, seed: int) -> None:
        """Finish the oldest groups only when they are too old, so that their prompts are requeued."""
        stragglers = sorted(self.generating.values(), key=lambda group: group.order)[: self.batch_size]
        dice = random.Random(seed)
        for group in stragglers:
            self.sample(group, dice)
        for _ in range(self.eta + 2):
            if self.core.may_admit():
                self.admit(100)
            for group in list(self.generating.values()):
                if group not in stragglers:
                    self.finish(group, dice)
            if self.core.step != self.last_step:
                self.the_trainer_asks_for_a_batch()
            if self.is_training:
                self.the_step_begins()
                self.the_new_version_is_published()
        for group in stragglers:
            if group.id in self.generating:
                self.finish(group, dice)
        if self.core.step != self.last_step:
            self.the_trainer_asks_for_a_batch()

    @rule()
    @precondition(lambda self: self.core.step == self.last_step)
    def nothing_is_left_to_do(self) -> None:
        assert not self.core.may_admit()

    # ---- live users

    def alive(self) -> list[Said]:
        """Return the turns that have not ended and were not trained by the present weights."""
        return [
            turn
            for turn in self.turns.values()
            if turn.end is None and not self.is_trained(turn, self.version)
        ]

    def trainable(self) -> list[Said]:
        return [
            turn
            for turn in self.alive()
            if turn.is_judged and turn.id not in self.withheld_turns and turn not in self.turns_in_training
        ]

    @rule(seed=st.integers(0, 1000), number=st.sampled_from([1, 1, 4, 12]))
    @precondition(lambda self: self.live_trajectories)
    def users_say_something(self, seed: int, number: int) -> None:
        dice = random.Random(seed)
        served = [self.served] if self.made is None or not self.is_exposed else [self.served, self.made[0]]
        for _ in range(number):
            known = list(self.turns.values())
            before = dice.choice(known[-8:]) if known and dice.random() < 0.7 else None
            versions = [dice.choice(served)]
            if dice.random() < 0.3:  # the answer has begun before updates
                versions.insert(0, dice.choice(self.updates.versions()))
            if dice.random() < 0.1:  # the gateway was cut off for long
                versions = [dice.choice(self.updates.versions())]
            turn = Said(-1 - len(self.turns), before, versions)
            self.turns[turn.id] = turn
            parent = before.id if before is not None else None
            if dice.random() < 0.2:
                turn.end = dice.choice([TurnEnd.SIDE, TurnEnd.CANCELLED])
                self.core.live.is_context(turn.id, parent, turn.end)
            else:
                self.core.live.arrived(turn.id, versions, parent)
        self.totals["turns"] += number
        self.note_expired()

    @rule(seed=st.integers(0, 1000), share=st.sampled_from([0.2, 0.8, 1.0]))
    @precondition(lambda self: self.turns)
    def turns_are_judged(self, seed: int, share: float) -> None:
        dice = random.Random(seed)
        for turn in self.alive():
            if not turn.is_judged and dice.random() < share:
                assert self.core.live.is_waiting(turn.id)
                self.core.live.ready(turn.id)
                turn.is_judged = True

    @rule(data=st.data())
    @precondition(lambda self: self.turns)
    def a_turn_is_forgotten(self, data: st.DataObject) -> None:
        turns = sorted(turn.id for turn in self.turns_in_training) or sorted(self.turns)
        turn = self.turns[data.draw(st.sampled_from(turns))]
        self.totals["turns forgotten in training"] += turn in self.turns_in_training
        ends_now = turn in self.alive() and turn not in self.turns_in_training
        assert self.core.live.ended(turn.id, TurnEnd.FORGOTTEN) == ends_now
        if turn in self.alive():
            turn.end = TurnEnd.FORGOTTEN
            self.withheld_turns.discard(turn.id)

    @rule(waits=st.booleans())
    @precondition(lambda self: self.live_trajectories)
    def the_patience_with_users_changes(self, waits: bool) -> None:
        self.waits_for_turns = waits

    waits_for_turns = False

    def check_wait(self) -> None:
        """The batch may wait: it would hold more turns than there are."""
        assert self.live_trajectories
        assert self.batch_size or self.trainable(), "there is nothing to train"
        assert self.core.live.available < self.live_trajectories

    def take_turns(self) -> None:
        """Check the turns of a batch that was taken."""
        trainable = self.trainable()
        paths = self.core.live.training
        ids = [id_ for path in paths for id_ in path]
        assert len(ids) == len(set(ids)), "a turn is in a batch twice"
        assert len(paths) <= self.live_trajectories
        assert len(paths) == self.live_trajectories or len(ids) == len(trainable), "a turn is left out"
        for path in paths:
            turns = [self.turns[id_] for id_ in path]
            for former, later in pairwise(turns):
                assert later.comes_after(former), "a trajectory is one path"
            for turn, stale in zip(turns, path.values(), strict=True):
                assert turn in trainable, "not judged, ended, trained or withheld"
                beyond = {version for version in turn.versions if self.lag(version) > self.eta}
                assert stale == beyond, "trained beyond the bound, or masked within it"
                assert beyond < set(turn.versions), "no token carries loss"
            # Nothing that is ready and continues the path, or leads to it, is left for another trajectory.
            for turn in trainable:
                if turn.id not in ids:
                    assert not turn.comes_after(turns[-1]), "the path goes on"
                    assert not turns[0].comes_after(turn), "the path begins before"
            if len(paths) < self.live_trajectories:
                self.totals["live trajectories in smaller batches"] += 1
        if ids and len(ids) < len(trainable):
            oldest = max(min(map(self.lag, turn.versions)) for turn in trainable)
            assert oldest in {min(map(self.lag, self.turns[id_].versions)) for id_ in ids}, "the oldest first"
        self.turns_in_training = [self.turns[id_] for id_ in ids]
        self.totals["turns trained"] += len(ids)
        self.totals["live trajectories"] += len(paths)

    @rule(seed=st.integers(0, 1000))
    @precondition(lambda self: self.trainable() and self.trainer_may_die)
    def ready_turns_are_withheld(self, seed: int) -> None:
        dice = random.Random(seed)
        self.withheld_turns = set()
        chosen = {turn.id for turn in self.trainable() if dice.random() < 0.5}
        self.core.withhold([*self.withheld, *chosen])
        self.withheld_turns = chosen
        self.totals["turns withheld"] += len(chosen)
        self.note_expired()

    @rule(data=st.data())
    @precondition(lambda self: self.trainable() and self.trainer_may_die and not self.is_copying)
    def a_turn_is_quarantined(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 3), "rarely"):
            return
        turns = [turn.id for turn in [*self.trainable(), *self.turns_in_training] if turn.end is None]
        id_ = data.draw(st.sampled_from(sorted(turns)))
        self.core.quarantine(id_)
        if self.is_training:
            self.note_given_back()
        self.turns[id_].end = TurnEnd.FAILED
        self.note_expired()

    @invariant()
    def every_turn_is_accounted_for(self) -> None:
        alive = self.alive()
        states, ends = self.core.live.states, self.core.live.ends
        waiting = sum(not turn.is_judged for turn in alive)
        forgotten = [turn for turn in self.turns_in_training if turn.end is not None]
        assert states[TurnState.WAITING] == waiting
        assert states[TurnState.TRAINING] == len(self.turns_in_training)
        ready = [turn for turn in alive if turn.is_judged and turn not in self.turns_in_training]
        assert states[TurnState.READY] == len(ready)
        trained = [turn for turn in self.turns.values() if self.is_trained(turn, self.version)]
        assert ends[TurnEnd.TRAINED] == len(trained)
        for end in set(TurnEnd) - {TurnEnd.TRAINED}:
            ended = [turn for turn in self.turns.values() if turn.end is end and turn not in trained]
            assert ends[end] == len([turn for turn in ended if turn not in forgotten])

    # ---- a trainer that dies

    @rule()
    @precondition(lambda self: self.is_training and self.trainer_may_die)
    def the_batch_is_given_back(self) -> None:
        self.core.give_back()
        self.note_given_back()
        self.note_expired()

    def note_given_back(self) -> None:
        if self.is_exposed:
            # Tokens of the lost version, also those that are still to be finished, lie off the line.
            self.is_disturbed = True
        self.ready.update((group.id, group) for group in self.training)
        self.training, self.made, self.is_exposed = [], None, False
        self.turns_in_training, self.is_training = [], False
        self.totals["batches given back"] += 1

    @rule(data=st.data())
    @precondition(lambda self: (self.training or self.ready) and self.trainer_may_die and not self.is_copying)
    def a_group_is_quarantined(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 3), "rarely"):
            return
        id_ = data.draw(st.sampled_from(sorted([*self.ready, *(group.id for group in self.training)])))
        self.core.quarantine(id_)
        if self.is_training:
            self.note_given_back()
        self.ready.pop(id_).loss = Loss.QUARANTINED
        self.withheld.discard(id_)
        self.note_expired()
        self.totals["groups quarantined"] += 1

    @rule(seed=st.integers(0, 1000), share=st.sampled_from([0.1, 0.5, 1.0]))
    @precondition(lambda self: self.ready and self.trainer_may_die)
    def ready_groups_are_withheld(self, seed: int, share: float) -> None:
        dice = random.Random(seed)
        if dice.random() < 0.3:
            self.withhold({id_ for id_ in sorted(self.ready) if dice.random() < share})

    @rule()
    @precondition(lambda self: self.withheld)
    def no_group_is_withheld_any_longer(self) -> None:
        self.withhold(())

    def withhold(self, ids: Collection[int]) -> None:
        gone = [group.id for group in self.groups.values() if group.loss is not None][-3:]
        self.core.withhold([*ids, *gone, *self.withheld_turns])
        self.withheld = set(ids)
        self.is_disturbed = self.is_disturbed or bool(ids)
        self.totals["groups withheld"] += len(ids)
        self.note_expired()

    # ---- restarts

    @rule(data=st.data(), seed=st.integers(0, 1000))
    @precondition(lambda self: self.restarts < MOST_RESTARTS and len(self.groups) > 0)
    def the_run_is_killed_and_resumed(self, data: st.DataObject, seed: int) -> None:
        """Go on from any checkpoint on the line of the present weights; recent tokens may be lost."""
        self.restart(data, seed, served=None)
        self.totals["restarts"] += 1

    @rule(data=st.data(), seed=st.integers(0, 1000))
    @precondition(lambda self: self.restarts < MOST_RESTARTS and self.trainer_may_die)
    def the_trainer_is_killed_and_restored(self, data: st.DataObject, seed: int) -> None:
        """The same, while the engines go on with the version that they serve."""
        self.restart(data, seed, served=self.served)
        self.totals["trainer restarts"] += 1
        self.totals["trainer restarts beyond the bound"] += self.is_starved()

    @rule(data=st.data(), seed=st.integers(0, 1000))
    @precondition(
        lambda self: (
            self.restarts < MOST_RESTARTS
            and self.trainer_may_die
            and self.is_too_far(min(self.checkpoints(), key=self.updates.steps))
        )
    )
    def the_trainer_is_restored_so_far_back_that_the_bound_is_exceeded(
        self, data: st.DataObject, seed: int
    ) -> None:
        """Restore it from where the rule above seldom does."""
        self.restart(data, seed, self.served, [v for v in self.checkpoints() if self.is_too_far(v)])
        self.totals["trainer restarts"] += 1
        self.totals["trainer restarts beyond the bound"] += 1

    @rule(data=st.data(), seed=st.integers(0, 1000))
    @precondition(
        lambda self: self.restarts < MOST_RESTARTS and self.trainer_may_die and self.checkpoints_near()
    )
    def the_trainer_is_restored_where_groups_can_begin_with_an_older_version(
        self, data: st.DataObject, seed: int
    ) -> None:
        """Groups are filtered or trained before, so that others begin, and soon reach their deadlines."""
        dice = random.Random(seed)
        for group in [*self.generating.values()]:
            if dice.random() < 0.8:
                self.core.filtered(group.id)
                self.generating.pop(group.id).loss = Loss.FILTERED
        while dice.random() < 0.9 and self.may_ask:
            self.the_trainer_asks_for_a_batch()
            if not self.is_training:
                break
            self.the_step_begins()
            self.the_new_version_is_published()
        if not self.checkpoints_near():
            return
        self.restart(data, seed, self.served, self.checkpoints_near())
        self.totals["trainer restarts"] += 1
        for _ in range(self.eta + 2):
            if self.core.may_admit() and dice.random() < 0.8:
                self.admit(100)
            self.groups_finish(seed, dice.choice([0.0, 0.3]))
            if self.served != self.version:
                self.the_restored_weights_get_a_new_number()
                self.the_new_version_is_published()
            if self.may_ask:
                self.the_trainer_asks_for_a_batch()
            if self.is_training:
                self.the_step_begins()
                self.the_new_version_is_published()

    def checkpoints_near(self) -> list[int]:
        """Return the versions from which a trainer can train what the engines serve, but has to hurry."""
        return [v for v in self.checkpoints() if 0 < self.updates.between(v, self.served) <= self.eta]

    def checkpoints(self) -> list[int]:
        """Return the versions that a restart can go on from."""
        line = self.updates.behind(self.version)
        return [version for version in self.published if self.updates.behind(version) <= line]

    def is_too_far(self, version: int) -> bool:
        """Return whether a trainer that is restored from ``version`` cannot train what the engines serve."""
        return self.updates.between(version, self.served) > self.eta

    def restart(
        self, data: st.DataObject, seed: int, served: int | None, checkpoints: Collection[int] = ()
    ) -> None:
        """``checkpoints``: to choose from; none: all."""
        versions = sorted(checkpoints or self.checkpoints(), reverse=True)
        restored = data.draw(st.sampled_from(versions), "checkpoint")
        dice = random.Random(seed)
        was_generating = set(self.generating) | self.unstarted
        self.restarts += 1
        self.begin_life(restored, served)
        left = [g for g in self.groups.values() if g.loss is None and not self.is_trained(g, restored)]
        begun: list[tuple[Episodes, set[int]]] = []
        fresh: list[Episodes] = []
        for group in left:
            is_ready = group.id not in was_generating
            if not is_ready:
                self.lose_tokens(group, dice)
            if is_ready or group.sampled:
                begun.append((group, group.carrying_loss if is_ready else self.to_come(group)))
            else:
                fresh.append(group)
        for group, versions in sorted(begun, key=lambda pair: (-self.largest_lag(pair[1]), pair[0].id)):
            if not self.restore(group, versions, is_ready=group.id not in was_generating):
                fresh.append(group)
        for group in sorted(fresh, key=lambda group: group.id):
            group.samples = [[] for _ in range(self.n)]
            group.without_loss = 0
            self.core.restore_unstarted(group.id, self.requeues(group.id))
        for id_ in self.owed():
            self.core.restore_requeued(id_, self.requeues(id_) + 1)
        self.unstarted = {group.id for group in fresh}
        self.restore_turns(dice)
        self.check_lags()

    def restore_turns(self, dice: random.Random) -> None:
        """Let in the turns from before. A trained turn whose training is lost is ready again."""
        for turn in self.turns.values():
            parent = turn.before.id if turn.before is not None else None
            if turn.end is not None:
                end = turn.end
                is_trained = self.is_trained(turn, self.version)
                self.core.live.is_context(turn.id, parent, TurnEnd.TRAINED if is_trained else end)
            elif self.is_trained(turn, self.version):
                self.core.live.is_context(turn.id, parent, TurnEnd.TRAINED)
            else:
                self.core.live.arrived(turn.id, turn.versions, parent)
                if turn.is_judged and self.core.live.is_alive(turn.id):
                    self.core.live.ready(turn.id)
        self.note_expired()

    @rule(data=st.data(), seed=st.integers(0, 1000))
    @precondition(lambda self: self.restarts < MOST_RESTARTS and self.owed())
    def the_run_is_killed_while_a_requeued_prompt_waits(self, data: st.DataObject, seed: int) -> None:
        """Kill the run at a moment that the rule above seldom meets."""
        self.the_run_is_killed_and_resumed(data, seed)

    def to_come(self, group: Episodes) -> set[int]:
        """Return the versions of the tokens that an unfinished group has or may get at once."""
        return group.sampled if self.is_starved() else group.sampled | {self.served}

    def lose_tokens(self, group: Episodes, dice: random.Random) -> None:
        """Lose the last tokens of a group, which were not on disk yet."""
        fate = dice.choice(["all", "nothing", "nothing", "some"])
        for tokens in group.samples:
            if fate == "all" or (fate == "some" and dice.random() < 0.5):
                del tokens[0 if fate == "all" else -1 :]

    def restore(self, group: Episodes, versions: set[int], *, is_ready: bool) -> bool:
        """Restore a group, and check that it is refused only if it would not be trained in time."""
        lag = self.largest_lag(versions)
        if self.is_masked():
            to_come = 0 if self.is_starved() else self.lag(self.served)
            lag = min(map(self.lag, versions), default=0) if is_ready else to_come
        has_room = self.core.held < self.batch_size * (self.eta - lag + 1)
        group.order = next(self.orders)
        if is_ready:
            assert self.core.restore_ready(group.id, versions, self.requeues(group.id)) == has_room
            if has_room:
                oldest = max(versions, key=self.lag, default=self.version)
                group.ticket = Ticket(group.id, oldest)
                group.was_fresh = True  # as fresh as the steps until it is trained ask for
                self.ready[group.id] = group
        else:
            assert self.core.may_have(group.sampled) | {self.version} == versions | {self.version}
            ticket = self.core.restore_open(group.id, versions, self.requeues(group.id))
            assert (ticket is not None) == has_room
            if ticket is not None:
                assert self.lag(ticket.version) == self.largest_lag(versions)
                group.ticket = ticket
                self.generating[group.id] = group
        self.totals["groups restored"] += has_room
        return has_room

    # ---- what holds at every moment

    @invariant()
    def every_group_is_accounted_for(self) -> None:
        counts, states = self.core.counts, self.core.states
        ended = Counter(group.loss.end for group in self.groups.values() if group.loss is not None)
        trained = {group.id for group in self.groups.values() if self.is_trained(group, self.version)}
        assert counts.admitted == len(self.groups)
        assert counts.trained == len(trained)
        assert len(trained) == self.core.step * self.batch_size
        assert (counts.filtered, counts.expired, counts.failed) == (
            ended[State.FILTERED],
            ended[State.EXPIRED],
            ended[State.FAILED],
        )
        alive = {*self.generating, *self.ready, *(group.id for group in self.training), *self.unstarted}
        assert len(alive) == counts.in_flight
        assert not alive & trained
        assert alive | trained == {group.id for group in self.groups.values() if group.loss is None}
        assert self.core.ready == len(self.ready)
        assert states[State.TRAINING] == len(self.training)
        assert self.core.open == len(self.generating)
        assert self.core.held == len(alive) - len(self.unstarted) - len(self.withheld)
        assert self.core.accepted == len(trained) + len(self.training) + len(self.ready) - len(self.withheld)

    @invariant()
    def somebody_can_always_go_on(self) -> None:
        """Unless a group is being generated or trained, a group can start or a batch is due.

        While the engines serve another version than the trainer holds, a copy of this one is published.
        """
        assert self.core.may_generate != self.is_starved()
        is_busy = bool(self.generating) or self.is_training or self.served != self.version
        if self.batch_size and not is_busy and self.core.step != self.last_step:
            may_train = len(self.ready) - len(self.withheld) >= self.batch_size
            assert self.core.may_admit() or may_train

    def is_consistent(self) -> bool:
        """Return False after an event that was cut short by a violation."""
        try:
            self.every_group_is_accounted_for()
            self.every_turn_is_accounted_for()
        except AssertionError:
            return False
        return True

    def teardown(self) -> None:
        """Liveness: whatever has happened, the run can do some more steps, or end."""
        if not hasattr(self, "core") or not self.is_consistent():
            return
        goal = self.core.step + STEPS_TO_GO_ON
        goal = goal if self.last_step is None else min(goal, self.last_step)
        dice = random.Random(0)
        self.withheld_turns = set()
        self.waits_for_turns = False
        self.withhold(())
        for number in range(60):
            if self.live_trajectories:
                self.users_say_something(number, 4)
                self.turns_are_judged(0, 1.0)
            if self.is_training and self.made is None:
                self.the_step_begins()
            if self.served != self.version and self.made is None:
                self.the_restored_weights_get_a_new_number()
            if self.made is not None:
                self.the_new_version_is_published()
            self.every_group_is_accounted_for()
            if self.core.step == goal:
                break
            if self.core.may_admit():
                self.admit(100)
            for group in list(self.generating.values()):
                self.finish(group, dice)
            self.the_trainer_asks_for_a_batch()
        assert self.core.step == goal, "the run has come to a stop"
        if goal == self.last_step:
            assert not self.core.may_admit()
