"""The control core: the bound on staleness, and the account of every group, over random schedules."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from slipstream.rollout.control.admission import Slots, VolumeGate
from slipstream.rollout.control.consumption import Fifo, OnStale, ReadyFirst, Windowed
from slipstream.rollout.control.core import REQUEUES, ControlError, GroupCounts, Loss, RolloutControl, Ticket
from slipstream.rollout.control.filters import MixedRewards
from slipstream.rollout.control.slots import State
from slipstream.rollout.control.versions import Restart
from slipstream.rollout.trajectory import UNSAMPLED, Finish, Group, Prompt, Trajectory


def group(ticket: Ticket, rewards=(0.0, 1.0), versions=None) -> Group:
    versions = [ticket.version] if versions is None else versions
    n = len(versions) + 1
    trajectories = tuple(
        Trajectory(
            np.arange(n),
            np.arange(n) > 0,
            np.zeros(n, np.float32),
            np.array([UNSAMPLED, *versions], np.int32),
            Finish.STOP,
            reward=reward,
        )
        for reward in rewards
    )
    return Group(ticket.id, Prompt(0, "?"), ticket.version, trajectories)


POLICIES = {
    "fifo": Fifo,
    "windowed 0": lambda: Windowed(0.0),
    "windowed 1/4": lambda: Windowed(0.25),
    "windowed 1/2": lambda: Windowed(0.5),
    "mask": lambda: ReadyFirst(OnStale.MASK),
    "requeue": lambda: ReadyFirst(OnStale.REQUEUE),
    "drop": lambda: ReadyFirst(OnStale.DROP),
}


class Schedule(RuleBasedStateMachine):
    """Any order of events that engines, workflows, the trainer and restarts can produce.

    The engines take a version some time before the core is told of it, and sample at any time with what they
    have. A straggler is a group that no rule happens to finish for long. A restart goes back to any version
    of the past; the model renumbers what is left of the groups as the ledger does.
    """

    consumption = Fifo
    admission = Slots

    @initialize(
        eta=st.integers(0, 4),
        batch_size=st.integers(1, 4),
        over_sampling=st.sampled_from([1.0, 1.0, 1.5, 2.0]),
    )
    def begin(self, eta, batch_size, over_sampling):
        if self.admission is VolumeGate:
            over_sampling = 1.0
        self.settings = (batch_size, eta, self.admission(), over_sampling)
        self.core = self.make_core()
        self.engine_version = 0
        self.generating: dict[int, Ticket] = {}
        self.sampled: dict[int, list[int]] = {}
        self.finished: dict[int, int] = {}  # id -> admission order
        self.order: dict[int, int] = {}
        self.training: list[int] = []
        self.trained: dict[int, int] = {}  # id -> the version that came of it
        self.ended: dict[int, Loss] = {}
        self.unstarted: set[int] = set()
        self.steps = {0: 0}
        self.last_version = 0

    def make_core(self, **state) -> RolloutControl:
        batch_size, eta, admission, over_sampling = self.settings
        return RolloutControl(batch_size, eta, admission, type(self).consumption(), over_sampling, **state)

    # ---- events

    @rule()
    @precondition(lambda self: self.core.may_admit())
    def admit(self):
        ticket = self.core.admit()
        assert ticket.version == self.core.version
        if ticket.id in self.unstarted:
            self.unstarted.remove(ticket.id)
        else:
            assert ticket.id not in self.sampled, "an id was given twice"
        if ticket.requeued_from is not None:
            assert self.ended[ticket.requeued_from] is Loss.REQUEUED
        self.order[ticket.id] = max(self.order.values(), default=0) + 1
        self.generating[ticket.id] = ticket
        self.sampled[ticket.id] = [self.engine_version]
        self.core.generating(ticket.id)

    @rule()
    @precondition(lambda self: self.generating)
    def every_running_group_samples(self):
        for id_ in self.generating:
            self.sampled[id_].append(self.engine_version)

    @rule(data=st.data(), end=st.sampled_from(["finished", "finished", "finished", "filtered", "failed"]))
    @precondition(lambda self: self.generating)
    def a_group_ends(self, data, end):
        ticket = self.generating.pop(data.draw(st.sampled_from(sorted(self.generating))))
        self.sampled[ticket.id].append(self.engine_version)
        self.core.judging(ticket.id)
        if end == "finished":
            self.finish(ticket)
        else:
            getattr(self.core, end)(ticket.id)
            self.ended[ticket.id] = Loss(end)

    def finish(self, ticket: Ticket):
        self.core.finished(group(ticket, versions=self.sampled[ticket.id]))
        self.finished[ticket.id] = self.order[ticket.id]

    @rule()
    @precondition(lambda self: not self.training)
    def the_trainer_asks_for_a_batch(self):
        oldest_first = sorted([*self.generating, *self.finished], key=self.order.__getitem__)
        batch = self.core.take_batch()
        self.note_expired()
        if self.core.consumption.on_stale is None:
            due = oldest_first[: self.core.batch_size]
            complete = len(due) == self.core.batch_size and set(due) <= set(self.finished)
            assert batch is not None or not complete, "the oldest groups are ready: nobody waits for more"
            if isinstance(self.core.consumption, Fifo) and batch is not None:
                assert [g.id for g in batch] == due, "admission order"
        if batch is None:
            return
        assert len(batch) == self.core.batch_size
        ids = [g.id for g in batch]
        assert ids == sorted(ids, key=self.order.__getitem__), "oldest first"
        assert not set(ids) & set(self.trained), "trained twice"
        for g in batch:
            assert len(g.trajectories) == 2, "groups are complete"
            for t in g.trajectories:
                lags = self.core.version - t.versions_T[t.loss_mask_T]
                assert len(lags) == 0 or 0 <= lags.min() <= lags.max() <= self.core.bound, lags
                if self.core.consumption.on_stale is not OnStale.MASK:
                    assert len(lags) == len(self.sampled[g.id]), "no token is lost"
            del self.finished[g.id]
        self.training = ids

    def note_expired(self):
        for expired in self.core.take_expired():
            self.ended[expired.id] = expired.loss
            assert (expired.group is not None) == (expired.id in self.finished)
            self.finished.pop(expired.id, None)
            self.generating.pop(expired.id, None)

    @rule()
    @precondition(lambda self: self.training and self.engine_version == self.core.version)
    def the_engines_take_the_new_version(self):
        self.engine_version = self.last_version = self.core.version + 1

    @rule()
    @precondition(lambda self: self.engine_version > self.core.version)
    def the_core_learns_of_it(self):
        self.core.published(self.engine_version)
        self.trained.update(dict.fromkeys(self.training, self.core.version))
        self.steps[self.core.version] = self.core.step
        self.training = []
        self.note_expired()

    @rule(data=st.data(), lost=st.booleans())
    def the_run_is_killed_and_resumed(self, data, lost):
        """From a version of the present line; what was sampled may be lost with it."""
        restored = data.draw(st.sampled_from(sorted(self.steps)))
        restart = Restart(1, restored, self.last_version + 1)
        self.last_version = self.engine_version = restart.version
        self.steps = {v: step for v, step in self.steps.items() if v <= restored}
        step = self.steps[restart.version] = self.steps[restored]
        undone = [id_ for id_, version in self.trained.items() if version > restored]
        for id_ in undone:
            del self.trained[id_]
        ready = {*self.finished, *self.training, *undone}
        open_ = [id_ for id_ in self.sampled if id_ not in self.trained and id_ not in self.ended]
        counts = GroupCounts(len(self.sampled), len(self.trained))
        for loss in self.ended.values():
            setattr(counts, loss.end.value, getattr(counts, loss.end.value) + 1)
        self.core = self.make_core(
            version=restart.version, step=step, counts=counts, accepted=step * self.settings[0]
        )
        self.generating, self.finished, self.training, self.order = {}, {}, [], {}
        fresh = [id_ for id_ in open_ if id_ in self.unstarted or (lost and id_ not in ready)]
        for id_ in open_:
            self.sampled[id_] = [restart.renumbered(v) for v in self.sampled[id_]]
        begun = sorted((min(self.sampled[id_]), id_) for id_ in open_ if id_ not in fresh)
        for oldest, id_ in begun:
            ticket = Ticket(id_, oldest)
            self.order[id_] = max(self.order.values(), default=0) + 1
            if id_ in ready:
                if self.core.restore_ready(group(ticket, versions=self.sampled[id_])):
                    self.finished[id_] = self.order[id_]
                    continue
            elif self.core.restore_open(id_, oldest) is not None:
                self.generating[id_] = ticket
                continue
            fresh.append(id_)
        self.unstarted = set(fresh)
        for id_ in sorted(fresh):
            self.order.pop(id_, None)
            self.core.restore_unstarted(id_)

    # ---- what holds at every moment

    @invariant()
    def every_group_is_accounted_for(self):
        counts = self.core.counts
        assert counts.admitted == len(self.sampled)
        assert counts.trained == len(self.trained)
        ends = [loss.end for loss in self.ended.values()]
        assert counts.filtered == ends.count(State.FILTERED)
        assert counts.failed == ends.count(State.FAILED)
        assert counts.expired == ends.count(State.EXPIRED)
        held = len(self.generating) + len(self.finished) + len(self.training)
        assert counts.in_flight == held + len(self.unstarted)
        assert self.core.ready == len(self.finished)
        assert sum(self.core.states.values()) == held

    @invariant()
    def masking_never_takes_all_of_a_group(self):
        _, _, admission, over_sampling = self.settings
        if self.core.consumption == ReadyFirst(OnStale.MASK) and over_sampling == 1:
            assert isinstance(admission, VolumeGate) or Loss.STALE not in self.ended.values()

    @invariant()
    def somebody_can_always_go_on(self):
        """Unless a group is being generated or trained, one can start or a batch is due."""
        if not self.generating and not self.training:
            assert self.core.may_admit() or len(self.finished) >= self.core.batch_size

    def teardown(self):
        """Liveness: whatever has happened, the run can do ten more steps."""
        if not hasattr(self, "core"):
            return
        goal = self.core.step + 10
        for _ in range(1000):
            if self.training:
                self.engine_version = self.last_version = self.core.version + 1
                self.the_core_learns_of_it()
            if self.core.step == goal:
                break
            while self.core.may_admit():
                self.admit()
            for ticket in list(self.generating.values()):
                self.sampled[ticket.id].append(self.engine_version)
                self.finish(self.generating.pop(ticket.id))
            self.the_trainer_asks_for_a_batch()
            self.every_group_is_accounted_for()
        assert self.core.step == goal, "the run has come to a stop"


@pytest.mark.parametrize("policy", POLICIES)
def test_bound_order_account_and_liveness_hold_in_every_schedule(policy):
    machine = type("Schedule", (Schedule,), {"consumption": staticmethod(POLICIES[policy])})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=50, deadline=None, database=None)
    )


@pytest.mark.parametrize("policy", ["fifo", "windowed 0", "mask"])
def test_they_hold_behind_the_volume_gate_as_well(policy):
    machine = type(
        "Schedule", (Schedule,), {"consumption": staticmethod(POLICIES[policy]), "admission": VolumeGate}
    )
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=50, deadline=None, database=None)
    )


def test_the_volume_gate_with_the_oldest_ready_first_breaks_the_bound():
    """What AReaL's gate really bounds; the same schedule under ``Fifo`` waits instead."""
    core = RolloutControl(1, 1, VolumeGate(), ReadyFirst(OnStale.TRAIN))
    slow = core.admit()
    for _ in range(5):
        core.finished(group(core.admit()))
        assert core.take_batch() is not None
        core.published(core.version + 1)
    core.finished(group(slow))
    [late] = core.take_batch()
    assert (core.version - late.admitted_at, core.bound) == (5, 1)


@pytest.mark.parametrize("eta", [0, 1, 4])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("policy", ["fifo", "windowed 0"])
def test_the_bound_is_reached_so_no_slot_is_wasted(eta, batch_size, policy):
    core = RolloutControl(batch_size, eta, consumption=POLICIES[policy]())
    tickets = [core.admit() for _ in range(core.capacity)]
    assert not core.may_admit()
    for ticket in tickets:
        core.finished(group(ticket))
    lags = []
    while (batch := core.take_batch()) is not None:
        lags.append({core.version - g.admitted_at for g in batch})
        core.published(core.version + 1)
    assert lags == [{lag} for lag in range(eta + 1)]


def test_a_slow_group_holds_up_its_batch_and_is_not_overtaken():
    core = RolloutControl(2, 1)
    slow, *others = [core.admit() for _ in range(4)]
    for ticket in others:
        core.finished(group(ticket))
    assert core.take_batch() is None
    core.finished(group(slow))
    assert [g.id for g in core.take_batch()] == [0, 1]


def test_in_a_window_a_slow_group_is_overtaken_until_its_deadline():
    core = RolloutControl(2, 2, consumption=Windowed(0.5))
    assert core.capacity == 3, "three of the six slots are kept free"
    slow = core.admit()
    for _ in range(2):
        while core.may_admit():
            core.finished(group(core.admit()))
        assert 0 not in [g.id for g in core.take_batch()]
        core.published(core.version + 1)
    while core.may_admit():
        core.finished(group(core.admit()))
    assert core.ready == 2
    assert core.take_batch() is None, "its last step has come"
    core.finished(group(slow))
    assert core.take_batch()[0].id == 0


def test_without_a_reserve_a_group_is_overtaken_as_long_as_it_can_be_trained_in_time():
    core = RolloutControl(1, 1, consumption=Windowed(0.0))
    slow, other = core.admit(), core.admit()
    core.finished(group(other))
    assert [g.id for g in core.take_batch()] == [other.id], "of the same version: either order is in time"
    core.published(1)
    core.finished(group(core.admit()))
    assert core.take_batch() is None
    core.finished(group(slow))
    assert [g.id for g in core.take_batch()] == [slow.id]


@pytest.mark.parametrize("on_stale", [OnStale.MASK, OnStale.REQUEUE, OnStale.DROP])
def test_a_group_outside_the_bound(on_stale):
    core = RolloutControl(1, 1, consumption=ReadyFirst(on_stale))
    slow = core.admit()
    for _ in range(3):
        core.finished(group(core.admit()))
        core.take_batch()
        core.published(core.version + 1)
    core.finished(group(slow, versions=[0, 1, 2, 3]))
    batch = core.take_batch()
    if on_stale is OnStale.MASK:
        assert [t.loss_mask_T.tolist() for t in batch[0].trajectories] == [
            [False, False, False, True, True]
        ] * 2
        assert core.take_expired() == []
        return
    assert batch is None
    [expired] = core.take_expired()
    assert (expired.id, expired.group.id) == (0, 0)
    assert expired.loss is (Loss.REQUEUED if on_stale is OnStale.REQUEUE else Loss.STALE)
    following = core.admit()
    assert following.requeued_from == (0 if on_stale is OnStale.REQUEUE else None)


def test_a_group_without_a_token_inside_the_bound_has_nothing_to_mask():
    core = RolloutControl(1, 0, consumption=ReadyFirst(OnStale.MASK), over_sampling=2)
    late = core.admit()
    core.finished(group(core.admit()))
    core.take_batch()
    core.published(1)
    core.finished(group(late))
    assert core.take_batch() is None
    assert [e.loss for e in core.take_expired()] == [Loss.STALE]


def test_a_prompt_is_requeued_a_few_times_only():
    core = RolloutControl(1, 0, consumption=ReadyFirst(OnStale.REQUEUE), over_sampling=2)
    losses = []
    for _ in range(REQUEUES + 1):
        slow = core.admit()
        assert (slow.requeued_from is None) == (not losses)
        core.finished(replace(group(core.admit())))
        core.take_batch()
        core.published(core.version + 1)
        core.finished(group(slow))
        core.take_batch()
        losses += [e.loss for e in core.take_expired()]
    assert losses == [Loss.REQUEUED] * REQUEUES + [Loss.STALE]


@pytest.mark.parametrize("policy", ["fifo", "windowed 0"])
def test_surplus_groups_are_given_up_when_their_deadline_has_passed(policy):
    core = RolloutControl(2, 0, consumption=POLICIES[policy](), over_sampling=1.5)
    tickets = [core.admit() for _ in range(3)]
    assert not core.may_admit()
    if policy == "fifo":
        core.filtered(tickets.pop(0).id)
        assert core.may_admit(), "a filtered group is replaced"
        tickets.append(core.admit())
    for ticket in tickets[:2] if policy == "fifo" else tickets[1:]:
        core.finished(group(ticket))
    assert core.take_batch() is not None
    core.published(1)
    [expired] = core.take_expired()
    assert (expired.loss, expired.group) == (Loss.SURPLUS, None)
    assert not core.is_open(expired.id)
    assert core.counts.in_flight == 0


@pytest.mark.parametrize("end", ["failed", "filtered"])
def test_a_group_that_is_not_trained_frees_its_slot_at_once(end):
    core = RolloutControl(1, 0)
    ticket = core.admit()
    getattr(core, end)(ticket.id)
    assert core.may_admit()
    assert core.admit().id == 1
    assert core.losses == {Loss(end): 1}


def test_a_trained_group_keeps_its_slot_until_its_version_is_published():
    core = RolloutControl(1, 0)
    core.finished(group(core.admit()))
    assert core.take_batch() is not None
    assert not core.may_admit()
    core.published(1)
    assert core.admit() == Ticket(id=1, version=1)


def test_groups_pass_through_their_states():
    core = RolloutControl(1, 0)

    def there():
        return [state for state, count in core.states.items() if count]

    ticket = core.admit()
    seen = [there()]
    for event in (core.generating, core.judging, core.generating):
        event(ticket.id)
        seen.append(there())
    core.finished(group(ticket))
    seen.append(there())
    core.take_batch()
    seen.append(there())
    core.published(1)
    assert seen == [
        ["admitted"],
        ["generating"],
        ["judging"],
        ["generating"],
        ["ready"],
        ["training"],
    ]
    assert there() == []


def test_a_resumed_run_goes_on_from_its_version():
    core = RolloutControl(1, 2, version=7, step=5, last_step=6)
    core.finished(group(core.admit()))
    assert core.take_batch()[0].admitted_at == 7
    with pytest.raises(ControlError, match="version 1 cannot follow 7"):
        core.published(1)
    core.published(8)
    assert (core.version, core.step) == (8, 6)
    assert not core.may_admit()


def ready(core):
    core.finished(group(core.admit()))


def training(core):
    ready(core)
    core.take_batch()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda core: [core.admit() for _ in range(3)], "2 groups hold a slot already"),
        (lambda core: core.failed(0), "group 0 is not being generated or judged"),
        (lambda core: core.filtered(5), "group 5 is not being generated"),
        (lambda core: core.judging(5), "group 5 is not being generated"),
        (lambda core: core.finished(group(Ticket(3, 0))), "group 3 is not being generated"),
        (lambda core: (ready(core), core.finished(group(Ticket(0, 0)))), "group 0 is not being"),
        (lambda core: (ready(core), core.failed(0)), "group 0 is not being generated"),
        (lambda core: (ready(core), core.generating(0)), "group 0 is not being generated"),
        (lambda core: (training(core), core.filtered(0)), "group 0 is not being generated"),
        (lambda core: (training(core), core.take_batch()), "has not been published"),
        (lambda core: (training(core), core.published(2)), "version 2 cannot follow 0"),
        (lambda core: (training(core), core.published(0)), "version 0 cannot follow 0"),
        # What follows would break the bound without anybody noticing.
        (lambda core: core.published(1), "trained on no batch"),
        (lambda core: (ready(core), core.published(1)), "trained on no batch"),
        (lambda core: (core.admit(), core.finished(group(Ticket(0, 1)))), "admitted at version 0, not at 1"),
    ],
)
def test_an_event_that_cannot_happen_is_refused_and_changes_nothing(misuse, message):
    core = RolloutControl(1, 1)
    with pytest.raises(ControlError, match=message):
        misuse(core)
    assert core.version == 0
    assert core.counts.trained == core.counts.failed == core.counts.filtered == 0


def test_the_filter_keeps_groups_whose_rewards_differ():
    keep = MixedRewards().keep
    assert keep(group(Ticket(0, 0), (0.0, 1.0)))
    assert not keep(group(Ticket(0, 0), (1.0, 1.0)))
    assert not keep(group(Ticket(0, 0), (0.5,)))


@pytest.mark.parametrize("eta", [0, 1, 5])
def test_no_group_is_admitted_that_the_last_step_would_not_train(eta):
    core = RolloutControl(2, eta, last_step=3)
    admitted = 0
    for version in range(3):
        while core.may_admit():
            ticket = core.admit()
            admitted += 1
            core.finished(group(ticket))
        assert core.take_batch() is not None
        core.published(version + 1)
    assert not core.may_admit()
    assert (admitted, core.counts.trained, core.counts.in_flight) == (6, 6, 0)


def test_a_lost_group_makes_room_for_another_one_before_the_last_version():
    core = RolloutControl(1, 4, last_step=1)
    ticket = core.admit()
    assert not core.may_admit()
    core.failed(ticket.id)
    assert core.may_admit()
