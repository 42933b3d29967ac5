"""The control core: the bound on staleness, and the account of every group, over random schedules."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollout.control.core import ControlError, RolloutControl, Ticket
from rollout.control.filters import MixedRewards
from rollout.trajectory import Finish, Group, Prompt, Trajectory


def group(ticket: Ticket, rewards=(0.0, 1.0)) -> Group:
    trajectories = tuple(
        Trajectory(
            np.array([1, 2]),
            np.array([False, True]),
            np.zeros(2, np.float32),
            np.array([-1, ticket.version], np.int32),
            Finish.STOP,
            reward=reward,
        )
        for reward in rewards
    )
    return Group(ticket.id, Prompt(0, "?"), ticket.version, trajectories)


class Schedule(RuleBasedStateMachine):
    """Any order of events that engines, workflows and the trainer can produce, with a model of the engines.

    The engines take a version some time before the core is told of it, and sample at any time with what they
    have. A straggler is a group that no rule happens to finish for long.
    """

    @rule(eta=st.integers(0, 5), batch_size=st.integers(1, 4))
    @precondition(lambda self: not hasattr(self, "core"))
    def begin(self, eta, batch_size):
        self.core = RolloutControl(batch_size, eta)
        self.engine_version = 0
        self.generating: dict[int, Ticket] = {}
        self.sampled: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.training: list[int] = []
        self.trained: list[int] = []
        self.ended = {"filtered": 0, "failed": 0}

    def began(self) -> bool:
        return hasattr(self, "core")

    # ---- events

    @rule()
    @precondition(lambda self: self.began() and self.core.may_admit())
    def admit(self):
        ticket = self.core.admit()
        assert ticket.version == self.core.version
        assert ticket.id not in self.sampled, "an id was given twice"
        self.generating[ticket.id] = ticket
        self.sampled[ticket.id] = [self.engine_version]

    @rule()
    @precondition(lambda self: self.began() and self.generating)
    def every_running_group_samples(self):
        for ticket_id in self.generating:
            self.sampled[ticket_id].append(self.engine_version)

    @rule(data=st.data(), end=st.sampled_from(["finished", "finished", "finished", "filtered", "failed"]))
    @precondition(lambda self: self.began() and self.generating)
    def a_group_ends(self, data, end):
        ticket = self.generating.pop(data.draw(st.sampled_from(sorted(self.generating))))
        self.sampled[ticket.id].append(self.engine_version)
        if end == "finished":
            self.core.finished(group(ticket))
            self.finished.add(ticket.id)
        else:
            getattr(self.core, end)(ticket.id)
            self.ended[end] += 1

    @rule()
    @precondition(lambda self: self.began() and not self.training)
    def the_trainer_asks_for_a_batch(self):
        batch = self.core.take_batch()
        waiting = sorted([*self.generating, *self.finished])
        due = waiting[: self.core.batch_size]
        complete = len(due) == self.core.batch_size and self.finished.issuperset(due)
        assert (batch is not None) == complete, "a batch is taken if and only if the oldest groups are ready"
        if batch is None:
            return
        assert [g.id for g in batch] == due, "admission order"
        assert not set(due) & set(self.trained), "trained twice"
        for g in batch:
            lags = [self.core.version - version for version in self.sampled[g.id]]
            assert max(lags) <= self.core.max_head_offpolicyness, f"group {g.id} has the lags {lags}"
        self.finished -= set(due)
        self.training = due

    @rule()
    @precondition(lambda self: self.began() and self.training and self.engine_version == self.core.version)
    def the_engines_take_the_new_version(self):
        self.engine_version += 1

    @rule()
    @precondition(lambda self: self.began() and self.engine_version > self.core.version)
    def the_core_learns_of_it(self):
        self.core.published(self.engine_version)
        self.trained += self.training
        self.training = []

    # ---- what holds at every moment

    @invariant()
    def every_group_is_accounted_for(self):
        if self.began():
            counts = self.core.counts
            assert counts.admitted == len(self.sampled)
            assert (counts.trained, counts.filtered, counts.failed, counts.expired) == (
                len(self.trained),
                self.ended["filtered"],
                self.ended["failed"],
                0,
            )
            assert counts.in_flight == len(self.generating) + len(self.finished) + len(self.training)
            assert counts.in_flight <= self.core.capacity
            assert self.core.ready == len(self.finished)

    @invariant()
    def somebody_can_always_go_on(self):
        """Unless a group is being generated or trained, one can start or a batch is due."""
        if self.began() and not self.generating and not self.training:
            assert self.core.may_admit() or len(self.finished) >= self.core.batch_size

    def teardown(self):
        """Liveness: once the running groups finish, everything but an incomplete last batch gets trained."""
        if not self.began():
            return
        for ticket in list(self.generating.values()):
            self.core.finished(group(ticket))
            self.finished.add(self.generating.pop(ticket.id).id)
        while True:
            if self.training:
                self.engine_version = self.core.version + 1
                self.the_core_learns_of_it()
            self.the_trainer_asks_for_a_batch()
            if not self.training:
                break
        assert len(self.finished) < self.core.batch_size
        assert self.core.may_admit()
        assert self.trained == sorted(self.trained)
        self.every_group_is_accounted_for()


def test_bound_order_and_account_hold_in_every_schedule():
    run_state_machine_as_test(
        Schedule, settings=settings(max_examples=150, stateful_step_count=60, deadline=None, database=None)
    )


@pytest.mark.parametrize("eta", [0, 1, 4])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_bound_is_reached_so_no_slot_is_wasted(eta, batch_size):
    core = RolloutControl(batch_size, eta)
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


@pytest.mark.parametrize("end", ["failed", "filtered"])
def test_a_group_that_is_not_trained_frees_its_slot_at_once(end):
    core = RolloutControl(1, 0)
    ticket = core.admit()
    getattr(core, end)(ticket.id)
    assert core.may_admit()
    assert core.admit().id == 1


def test_a_trained_group_keeps_its_slot_until_its_version_is_published():
    core = RolloutControl(1, 0)
    core.finished(group(core.admit()))
    assert core.take_batch() is not None
    assert not core.may_admit()
    core.published(1)
    assert core.admit() == Ticket(id=1, version=1)


def test_a_resumed_run_goes_on_from_its_version():
    core = RolloutControl(1, 2, version=7)
    core.finished(group(core.admit()))
    assert core.take_batch()[0].admitted_at == 7
    with pytest.raises(ControlError, match="version 1 cannot follow 7"):
        core.published(1)
    core.published(8)
    assert core.version == 8


def ready(core):
    core.finished(group(core.admit()))


def training(core):
    ready(core)
    core.take_batch()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda core: [core.admit() for _ in range(3)], "2 groups hold a slot already"),
        (lambda core: core.failed(0), "group 0 is not being generated"),
        (lambda core: core.filtered(5), "group 5 is not being generated"),
        (lambda core: core.finished(group(Ticket(3, 0))), "group 3 is not being generated"),
        (lambda core: (ready(core), core.finished(group(Ticket(0, 0)))), "group 0 is not being"),
        (lambda core: (ready(core), core.failed(0)), "group 0 is not being generated"),
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
    core = RolloutControl(2, eta, last_version=3)
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
    core = RolloutControl(1, 4, last_version=1)
    ticket = core.admit()
    assert not core.may_admit()
    core.failed(ticket.id)
    assert core.may_admit()
