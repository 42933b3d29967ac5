"""The control core by hand-written schedules: admission, batches, restarts, a trainer that dies."""

from typing import Any

import numpy as np
import pytest

from slipstream.rollout.control.admission import by_volume
from slipstream.rollout.control.consumption import Fifo, OnStale, ReadyFirst, Windowed
from slipstream.rollout.control.core import REQUEUES, RolloutControl, Ticket
from slipstream.rollout.control.ends import GroupCounts, Loss
from slipstream.rollout.control.filters import MixedRewards
from slipstream.rollout.control.slots import State
from slipstream.rollout.control.versions import ControlError, UnknownVersion, VersionTree
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Group, Prompt, Trajectory


def finish(core: RolloutControl, *tickets: Ticket) -> None:
    """Finish groups whose tokens are all of the version that was served at their admission."""
    for ticket in tickets:
        core.finished(ticket.id, {ticket.version})


def ready(core: RolloutControl, groups: int = 1) -> list[int]:
    """Admit groups and finish them at once."""
    tickets = [core.admit() for _ in range(groups)]
    finish(core, *tickets)
    return [ticket.id for ticket in tickets]


def train(core: RolloutControl) -> list[int] | None:
    """Train a batch and publish its version. Return its groups, or None if no batch is due."""
    batch = core.take_batch()
    if batch is None:
        return None
    core.published(core.begin_step())
    return list(batch)


# ---- the bound


def test_the_volume_gate_with_the_oldest_ready_first_breaks_the_bound():
    """AReaL's gate bounds the number of groups; the same schedule under ``Fifo`` waits instead."""
    core = RolloutControl(1, 1, by_volume, ReadyFirst(OnStale.TRAIN))
    slow = core.admit()
    for _ in range(5):
        ready(core)
        assert train(core) is not None
    finish(core, slow)
    assert core.take_batch() == {slow.id: frozenset()}
    assert (core.lag(slow.version), core.bound) == (5, 1)


@pytest.mark.parametrize("eta", [0, 1, 4])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("policy", [Fifo(), Windowed(0.0)])
def test_the_bound_is_reached_so_no_slot_is_wasted(eta, batch_size, policy):
    core = RolloutControl(batch_size, eta, consumption=policy)
    ready(core, core.capacity)
    assert not core.may_admit()
    lags = []
    while (batch := core.take_batch()) is not None:
        assert len(batch) == batch_size
        lags.append(core.lag(0))
        core.published(core.begin_step())
    assert lags == list(range(eta + 1))


def test_a_slow_group_holds_up_its_batch_and_is_not_overtaken():
    core = RolloutControl(2, 1)
    slow, *others = [core.admit() for _ in range(4)]
    finish(core, *others)
    assert core.take_batch() is None
    finish(core, slow)
    assert core.take_batch() == {0: frozenset(), 1: frozenset()}


def test_in_a_window_a_slow_group_is_overtaken_until_its_deadline():
    core = RolloutControl(2, 2, consumption=Windowed(0.5))
    assert core.capacity == 3, "three of the six slots are kept free"
    slow = core.admit()
    for _ in range(2):
        ready(core, 2)
        assert slow.id not in train(core)
    ready(core, 2)
    assert core.take_batch() is None, "its last step has come"
    finish(core, slow)
    assert train(core)[0] == slow.id


def test_without_a_reserve_a_group_is_overtaken_as_long_as_it_can_be_trained_in_time():
    core = RolloutControl(1, 1, consumption=Windowed(0.0))
    slow, other = core.admit(), core.admit()
    finish(core, other)
    assert train(core) == [other.id], "of the same version: either order is in time"
    ready(core)
    assert core.take_batch() is None
    finish(core, slow)
    assert train(core) == [slow.id]


# ---- groups beyond the bound


@pytest.mark.parametrize("on_stale", [OnStale.MASK, OnStale.REQUEUE, OnStale.DROP])
def test_a_group_outside_the_bound(on_stale):
    core = RolloutControl(1, 1, consumption=ReadyFirst(on_stale))
    slow = core.admit()
    for _ in range(3):
        ready(core)
        train(core)
    core.finished(slow.id, [0, 1, 2, 3])
    batch = core.take_batch()
    if on_stale is OnStale.MASK:
        assert batch == {slow.id: frozenset({0, 1})}
        assert core.take_expired() == {}
        return
    assert batch is None
    requeued = on_stale is OnStale.REQUEUE
    assert core.take_expired() == {slow.id: Loss.REQUEUED if requeued else Loss.STALE}
    assert core.admit().requeued_from == (slow.id if requeued else None)


def test_a_group_without_a_token_inside_the_bound_has_nothing_to_mask():
    core = RolloutControl(1, 0, consumption=ReadyFirst(OnStale.MASK), over_sampling=2)
    late = core.admit()
    ready(core)
    train(core)
    finish(core, late)
    assert core.take_batch() is None
    assert core.take_expired() == {late.id: Loss.STALE}


def test_a_group_whose_tokens_carry_no_loss_is_never_too_old():
    core = RolloutControl(1, 0, consumption=ReadyFirst(OnStale.MASK), over_sampling=2)
    late = core.admit()
    ready(core)
    train(core)
    core.finished(late.id, ())
    assert core.take_batch() == {late.id: frozenset()}


def test_a_prompt_is_requeued_a_few_times_only():
    core = RolloutControl(1, 0, consumption=ReadyFirst(OnStale.REQUEUE), over_sampling=2)
    losses = []
    for _ in range(REQUEUES + 1):
        slow = core.admit()
        assert (slow.requeued_from is None) == (not losses)
        ready(core)
        train(core)
        finish(core, slow)
        core.take_batch()
        losses += core.take_expired().values()
    assert losses == [Loss.REQUEUED] * REQUEUES + [Loss.STALE]


def test_restarts_neither_forget_a_requeued_prompt_nor_how_often_it_was_requeued():
    losses: list[Loss] = []
    core = RolloutControl(1, 0, consumption=ReadyFirst(OnStale.REQUEUE), over_sampling=2)
    slow = core.admit()
    while len(losses) <= REQUEUES:
        ready(core)
        train(core)
        finish(core, slow)
        assert core.take_batch() is None
        losses += core.take_expired().values()
        again = RolloutControl(
            1,
            0,
            consumption=ReadyFirst(OnStale.REQUEUE),
            over_sampling=2,
            versions=core.versions,
            version=core.version,
            counts=core.counts,
        )
        if losses[-1] is Loss.REQUEUED:
            again.restore_requeued(slow.id, len(losses))
        before, slow, core = slow, again.admit(), again
        assert slow.requeued_from == (before.id if losses[-1] is Loss.REQUEUED else None)
    assert losses == [Loss.REQUEUED] * REQUEUES + [Loss.STALE]


@pytest.mark.parametrize("left", ["nothing", "a part", "all"])
def test_a_restored_group_keeps_the_number_of_times_that_its_prompt_was_requeued(left):
    counts = GroupCounts(admitted=8, expired=7)
    core = RolloutControl(1, 0, consumption=ReadyFirst(OnStale.REQUEUE), over_sampling=2, counts=counts)
    if left == "nothing":
        core.restore_unstarted(7, REQUEUES)
        assert core.admit() == Ticket(7, 0)
    elif left == "a part":
        assert core.restore_open(7, {0}, REQUEUES) == Ticket(7, 0)
    else:
        assert core.restore_ready(7, {0}, REQUEUES)
        core.withhold([7])
    assert ready(core) == train(core) == [8]
    if left == "all":
        core.withhold([])
    else:
        core.finished(7, {0})
    assert core.take_batch() is None
    assert core.take_expired() == {7: Loss.STALE}


@pytest.mark.parametrize("policy", [Fifo(), Windowed(0.0)])
def test_surplus_groups_are_given_up_when_their_deadline_has_passed(policy):
    core = RolloutControl(2, 0, consumption=policy, over_sampling=1.5)
    tickets = [core.admit() for _ in range(3)]
    assert not core.may_admit()
    if isinstance(policy, Fifo):
        core.filtered(tickets.pop(0).id)
        assert core.may_admit(), "a filtered group is replaced"
        tickets.append(core.admit())
    finish(core, *(tickets[:2] if isinstance(policy, Fifo) else tickets[1:]))
    assert train(core) is not None
    [(id_, loss)] = core.take_expired().items()
    assert loss is Loss.SURPLUS
    assert not core.is_open(id_)
    assert core.counts.in_flight == 0


@pytest.mark.parametrize("policy", [Fifo(), Windowed(0.0)])
def test_a_group_with_a_token_older_than_its_ticket_is_not_trained_beyond_the_bound(policy):
    """Engines that attest older weights than they should hold cannot break the bound."""
    core = RolloutControl(1, 1, consumption=policy)
    for _ in range(2):
        ready(core)
        train(core)
    bad, good = core.admit(), core.admit()
    core.finished(bad.id, {0, 2})
    assert core.take_expired() == {bad.id: Loss.STALE}
    core.finished(good.id, {1, 2})
    assert core.take_batch() == {good.id: frozenset()}


# ---- slots and states


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
    ready(core)
    assert core.take_batch() is not None
    version = core.begin_step()
    assert not core.may_admit()
    core.published(version)
    assert core.admit() == Ticket(id=1, version=1)


def present(core: RolloutControl) -> list[State]:
    """Return the states that groups are in."""
    return [state for state, groups in core.states.items() if groups]


def test_groups_pass_through_their_states():
    core = RolloutControl(1, 0)
    ticket = core.admit()
    states = [present(core)]
    for event in (core.generating, core.judging, core.generating):
        event(ticket.id)
        states.append(present(core))
    finish(core, ticket)
    states.append(present(core))
    core.take_batch()
    states.append(present(core))
    assert states == [
        ["admitted"],
        ["generating"],
        ["judging"],
        ["generating"],
        ["ready"],
        ["training"],
    ]
    core.give_back()
    assert present(core) == ["ready"]
    train(core)
    assert present(core) == []


@pytest.mark.parametrize("eta", [0, 1, 5])
def test_no_group_is_admitted_that_the_last_step_would_not_train(eta):
    core = RolloutControl(2, eta, last_step=3)
    for _ in range(3):
        while core.may_admit():
            ready(core)
        assert train(core) is not None
    assert not core.may_admit()
    assert (core.counts.admitted, core.counts.trained, core.counts.in_flight) == (6, 6, 0)


def test_a_lost_group_makes_room_for_another_one_before_the_last_version():
    core = RolloutControl(1, 4, last_step=1)
    ticket = core.admit()
    assert not core.may_admit()
    core.failed(ticket.id)
    assert core.may_admit()


# ---- restarts


ABANDONED = {1: 0, 2: 1, 3: 2, 4: 3, 5: 2}
"""Versions 3 and 4 were made of version 2, and 5 was begun; the run goes on from version 2."""


def test_a_resumed_run_serves_the_restored_version_under_its_name():
    core = RolloutControl(1, 2, versions=VersionTree(ABANDONED), version=2, last_step=4)
    assert (core.version, core.step) == (2, 2)
    assert core.admit() == Ticket(0, 2)
    finish(core, Ticket(0, 2))
    core.take_batch()
    assert core.begin_step() == 6, "3, 4 and 5 are names of other weights"
    core.published(6)
    assert (core.version, core.step) == (6, 3)
    assert [core.lag(version) for version in range(7)] == [3, 2, 1, 2, 3, 2, 0]


def test_a_core_cannot_serve_a_version_that_was_never_begun():
    with pytest.raises(UnknownVersion, match=r"version 6 was never begun.* 0 to 5"):
        RolloutControl(1, 2, versions=VersionTree(ABANDONED), version=6)


def test_restored_groups_are_as_old_as_their_oldest_token_on_whichever_branch():
    core = RolloutControl(1, 2, versions=VersionTree(ABANDONED), version=2)
    assert core.restore_open(7, {2, 4}) == Ticket(7, 4), "version 4 is two updates away"
    assert core.restore_open(8, {1, 2}) == Ticket(8, 1)
    assert core.restore_open(9, ()) == Ticket(9, 2), "no token is left"
    core.finished(7, {2, 4})
    assert core.take_batch() == {7: frozenset()}


@pytest.mark.parametrize(("versions", "restored"), [({0}, False), ({4, 2}, False), ({3}, True), ({2}, True)])
def test_a_group_beyond_the_bound_is_not_restored(versions, restored):
    def core():
        return RolloutControl(1, 1, versions=VersionTree(ABANDONED), version=2)

    assert core().restore_ready(0, versions) is restored
    assert (core().restore_open(0, versions) is not None) is restored


def test_no_more_groups_are_restored_than_the_steps_until_their_deadline_train():
    core = RolloutControl(2, 1, versions=VersionTree(ABANDONED), version=2)
    assert [core.restore_ready(id_, {1}) for id_ in range(3)] == [True, True, False]
    assert [core.restore_ready(id_, {2}) for id_ in range(3, 6)] == [True, True, False]
    core.restore_unstarted(2)
    assert not core.may_admit()
    assert [train(core), train(core)] == [[0, 1], [3, 4]]
    assert core.take_expired() == {}
    assert core.admit() == Ticket(2, core.version)


def test_groups_must_be_restored_in_the_order_of_their_lags():
    core = RolloutControl(1, 2, versions=VersionTree(ABANDONED), version=2)
    core.restore_ready(0, {1})
    with pytest.raises(ControlError, match="with a lag of 2 was restored after a group with a lag of 1"):
        core.restore_ready(1, {4})


# ---- a trainer that dies


def test_a_batch_that_is_given_back_is_taken_again_in_its_old_order():
    core = RolloutControl(2, 1)
    first, second, third = ready(core, 3)
    batch = core.take_batch()
    assert core.begin_step() == 1
    core.give_back()
    assert (core.version, core.ready, core.accepted) == (0, 3, 3)
    assert core.take_batch() == batch == {first: frozenset(), second: frozenset()}
    assert core.begin_step() == 2, "version 1 was begun, and engines may have had it"
    core.published(2)
    assert (core.version, core.step, core.versions.parent(2)) == (2, 1, 0)
    assert core.counts.trained == 2
    ready(core)
    assert next(iter(core.take_batch())) == third


@pytest.mark.parametrize("policy", [Fifo(), Windowed(0.0)])
@pytest.mark.parametrize("is_withheld", [False, True])
@pytest.mark.parametrize("end", ["given back", "quarantined"])
@pytest.mark.parametrize("bound", [0, 1])
def test_tokens_of_a_version_that_was_given_back_lie_on_a_branch(policy, is_withheld, end, bound):
    """Their lag at the step that makes up for it is 1: with bound 0 they cannot be trained."""
    core = RolloutControl(1, bound, consumption=policy, over_sampling=2)
    batch, other = core.admit(), core.admit()
    finish(core, batch)
    core.take_batch()
    lost = core.begin_step()
    core.finished(other.id, {0, lost})
    if is_withheld:
        core.withhold({other.id})
    if end == "given back":
        core.give_back()
    core.quarantine(batch.id)
    assert core.lag(lost) == 1
    if bound == 0:
        assert core.take_expired() == {other.id: Loss.STALE if is_withheld else Loss.SURPLUS}
        return
    assert core.take_expired() == {}
    core.withhold(())
    assert core.take_batch() == {other.id: frozenset()}


def left_behind(
    bound: int, batch_size: int = 1, *, live_trajectories: int = 0, **policies: Any
) -> RolloutControl:
    """Return the core of a trainer that was restored to version 0, while the engines serve version 3."""
    return RolloutControl(
        batch_size,
        bound,
        versions=VersionTree({1: 0, 2: 1, 3: 2}),
        served=3,
        live_trajectories=live_trajectories,
        **policies,
    )


def test_what_the_engines_serve_within_the_bound_is_trained():
    core = left_behind(3)
    assert core.may_generate
    ticket = core.admit()
    assert ticket == Ticket(0, 3) and core.lag(3) == 3
    finish(core, ticket)
    core.published(core.begin_copy())
    assert train(core) == [0]


@pytest.mark.parametrize("policy", [Fifo(), Windowed(0.0), Windowed(0.25)])
@pytest.mark.parametrize("bound", [3, 4, 5])
def test_no_more_groups_begin_with_an_older_version_than_can_be_trained_in_time(policy, bound):
    """Groups that a restart has restored are trained before them, although their tokens are fresher."""
    core = left_behind(bound, 2, consumption=policy, counts=GroupCounts(3))
    assert all(core.restore_ready(id_, {0}) for id_ in range(3))
    begun = 0
    while core.may_admit():
        finish(core, core.admit())
        begun += 1
    assert begun == max(0, 2 * (bound + 1 - 3) - 3)
    core.published(core.begin_copy())
    while core.counts.in_flight:
        while core.counts.in_flight < 2:
            ready(core)
        assert train(core)
    assert core.take_expired() == {}


def test_restored_weights_are_published_under_a_new_number():
    core = left_behind(2)
    assert not core.may_generate and not core.may_admit()
    assert core.begin_copy() == 4
    assert core.version_in_the_making == 4 and not core.may_admit()
    core.published(4)
    assert (core.version, core.served, core.step) == (4, None, 0), "no step was trained"
    assert [core.lag(version) for version in range(5)] == [0, 1, 2, 3, 0]
    ticket = core.admit()
    assert ticket == Ticket(0, 4)
    finish(core, ticket)
    assert train(core) == [0]
    assert (core.version, core.step) == (5, 1)


@pytest.mark.parametrize("policy", [Fifo(), Windowed(0.25), ReadyFirst(OnStale.MASK)])
@pytest.mark.parametrize("bound", [0, 2])
def test_a_batch_is_whole_also_if_less_is_left_of_it(policy, bound):
    """The volume gate counts what was trained: behind a smaller batch it would admit too many groups."""
    core = left_behind(bound, 2, admission=by_volume, consumption=policy, counts=GroupCounts(1))
    assert core.restore_ready(0, {0})
    core.published(core.begin_copy())
    assert core.take_batch() is None
    for _ in range(4):
        while core.may_admit():
            ready(core)
        assert train(core)
    assert core.counts.trained == core.step * 2
    assert core.take_expired() == {}


def test_turns_of_live_users_go_on_when_the_engines_serve_the_restored_weights():
    core = left_behind(2, 0, live_trajectories=1)
    core.live.arrived(-1, {3})
    assert list(core.live.take_expired()) == [-1], "the answer cannot be trained any more"
    core.begin_copy()
    core.live.arrived(-2, {3, 4})
    core.live.arrived(-3, {4})
    core.published(4)
    core.live.ready(-2)
    assert core.take_batch() == {}
    assert core.live.training == [{-2: {3}}]
    core.published(core.begin_step())
    core.live.ready(-3)
    assert core.take_batch() == {} and core.lag(4) == 1
    assert core.live.training == [{-3: frozenset()}]


def test_a_group_that_goes_on_after_the_restored_weights_were_published_has_fresh_tokens():
    core = left_behind(2)
    assert core.may_have({0}) == {0}, "no engine works on it before"
    assert core.restore_open(1, {0, 3}) is None
    assert core.restore_open(0, {0}) == Ticket(0, 0)
    core.published(core.begin_copy())
    core.finished(0, {0, 4})
    assert core.take_batch() == {0: frozenset()}


def test_no_batch_is_taken_before_the_engines_serve_the_restored_weights():
    core = left_behind(3)
    core.restore_ready(0, {0})
    expected = "the engines serve version 3: publish a copy of version 0 first"
    with pytest.raises(ControlError, match=expected):
        core.take_batch()
    core.begin_copy()
    with pytest.raises(ControlError, match="version 4 is in the making"):
        core.begin_copy()
    with pytest.raises(ControlError, match=expected):
        core.take_batch()
    core.published(4)
    with pytest.raises(ControlError, match="the engines serve version 4 already"):
        core.begin_copy()
    assert core.take_batch() == {0: frozenset()}


def test_tokens_of_the_version_in_the_making_are_fresh_once_it_is_published():
    core = RolloutControl(1, 1)
    first, second = core.admit(), core.admit()
    finish(core, first)
    core.take_batch()
    version = core.begin_step()
    core.finished(second.id, {version})
    core.published(version)
    assert core.lag(version) == 0
    assert core.take_batch() == {second.id: frozenset()}


def test_a_quarantined_group_is_never_trained_and_its_slot_is_free():
    core = RolloutControl(2, 0)
    good, culprit = ready(core, 2)
    core.take_batch()
    core.begin_step()
    core.quarantine(culprit)
    assert (core.counts.failed, core.losses) == (1, {Loss.QUARANTINED: 1})
    assert Loss.QUARANTINED.end is State.FAILED
    assert core.take_expired() == {}, "the caller knows it already"
    assert core.ready == 1
    [other] = ready(core)
    assert train(core) == [good, other]


@pytest.mark.parametrize("policy", [Fifo(), Windowed(0.0), ReadyFirst(OnStale.MASK)])
def test_withheld_groups_are_left_out_until_they_are_released(policy):
    core = RolloutControl(2, 2, consumption=policy)
    first, second, third, fourth = ready(core, 4)
    core.withhold({first, third})
    assert train(core) == [second, fourth]
    core.withhold({third})
    [fifth] = ready(core)
    assert train(core) == [first, fifth]
    core.withhold(())
    [sixth] = ready(core)
    assert train(core) == [third, sixth]
    assert core.take_expired() == {}


@pytest.mark.parametrize("policy", [Fifo(), Windowed(0.0), ReadyFirst(OnStale.DROP)])
@pytest.mark.parametrize("admission", ["slots", "volume"])
def test_a_synchronous_run_can_leave_out_half_of_a_batch(policy, admission):
    """All slots belong to the batch: without others in the place of withheld groups, the run would stop."""
    gate = {"admission": by_volume} if admission == "volume" else {}
    core = RolloutControl(2, 0, consumption=policy, **gate)
    suspect, good = ready(core, 2)
    assert not core.may_admit()
    core.withhold({suspect})
    [other] = ready(core)
    assert train(core) == [good, other]
    core.withhold(())
    batches = []
    for _ in range(2):
        while core.may_admit():
            ready(core)
        batches.append(train(core))
    assert [3, 4] in batches
    assert core.take_expired() == {suspect: Loss.STALE}, "its only step has passed"


def test_a_slow_group_does_not_hold_up_a_batch_of_groups_that_return_in_front_of_it():
    core = RolloutControl(1, 2)
    [first] = ready(core)
    core.admit()
    core.withhold({first})
    assert core.take_batch() is None
    core.withhold(())
    assert core.take_batch() == {first: frozenset()}


def test_a_window_is_not_held_up_for_ever_by_groups_that_return():
    """After their return more groups wait than can meet their deadlines, but waiting would not help."""
    core = RolloutControl(1, 1, consumption=Windowed(0.0))
    core.withhold(ready(core, 2))
    ready(core, 2)
    core.withhold(())
    assert [train(core), train(core)] == [[0], [1]]
    assert core.take_expired() == {2: Loss.STALE, 3: Loss.STALE}


def test_groups_that_have_ended_are_ignored_when_others_are_withheld():
    core = RolloutControl(1, 1)
    core.failed(core.admit().id)
    [waiting] = ready(core)
    core.withhold({0, 17, waiting})
    assert (core.ready, core.held) == (1, 0)


# ---- what cannot happen


def training(core: RolloutControl) -> None:
    ready(core)
    core.take_batch()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda core: [core.admit() for _ in range(3)], "2 groups hold a slot already"),
        (lambda core: core.failed(0), "group 0 is not being generated or judged"),
        (lambda core: core.filtered(5), "group 5 is not being generated"),
        (lambda core: core.judging(5), "group 5 is not being generated"),
        (lambda core: core.finished(3, {0}), "group 3 is not being generated"),
        (lambda core: (ready(core), core.finished(0, {0})), "group 0 is not being"),
        (lambda core: (core.admit(), core.finished(0, {0, 1})), "policy version 1 was never begun"),
        (lambda core: (ready(core), core.failed(0)), "group 0 is not being generated"),
        (lambda core: (ready(core), core.generating(0)), "group 0 is not being generated"),
        (lambda core: (training(core), core.filtered(0)), "group 0 is not being generated"),
        (lambda core: (training(core), core.take_batch()), "neither published nor given back"),
        (lambda core: core.begin_step(), "no batch is in training"),
        (lambda core: (ready(core), core.begin_step()), "no batch is in training"),
        (lambda core: (training(core), core.begin_step(), core.begin_step()), "it makes version 1"),
        (lambda core: core.published(1), "version 1 cannot follow version 0: no version was begun"),
        (lambda core: (training(core), core.published(1)), "cannot follow version 0: no version was begun"),
        (lambda core: (training(core), core.begin_step(), core.published(2)), "version 1 was begun"),
        (lambda core: (training(core), core.begin_step(), core.published(0)), "version 1 was begun"),
        (lambda core: core.give_back(), "no batch is in training"),
        (lambda core: (ready(core), core.give_back()), "no batch is in training"),
        (lambda core: core.quarantine(0), "group 0 is neither ready nor in training"),
        (lambda core: (core.admit(), core.quarantine(0)), "group 0 is neither ready nor in training"),
        (lambda core: (core.admit(), core.withhold({0})), "group 0 is admitted"),
        (lambda core: (training(core), core.withhold({0})), "group 0 is training"),
        (lambda core: core.restore_open(0, {1}), "policy version 1 was never begun"),
        (lambda core: core.restore_ready(0, {1}), "policy version 1 was never begun"),
    ],
)
def test_an_event_that_cannot_happen_is_refused_and_changes_nothing(misuse, message):
    core = RolloutControl(1, 1)
    with pytest.raises(ControlError, match=message):
        misuse(core)
    assert core.version == core.step == 0
    assert core.counts.trained == core.counts.failed == core.counts.filtered == 0
    assert sum(core.states.values()) == core.counts.admitted == core.counts.in_flight


# ---- filters


def judged(*rewards: float) -> Group:
    """Return a group with one trajectory for each reward."""
    mask_T = np.array([False, True])
    logprobs_T, versions_T = np.zeros(2, np.float32), np.array([UNSAMPLED, 0], np.int32)
    trajectories = tuple(
        Trajectory(np.arange(2), mask_T, logprobs_T, versions_T, Finish.STOP, reward=reward)
        for reward in rewards
    )
    return Group(0, Prompt(0, "?"), 0, trajectories)


def test_the_filter_keeps_groups_whose_rewards_differ():
    keep = MixedRewards().keep
    assert keep(judged(0.0, 1.0))
    assert not keep(judged(1.0, 1.0))
    assert not keep(judged(0.5))
