"""The admission gate: waits that end, cancellations that lose nothing, and a ledger that knows everything."""

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.simulate import clock
from slipstream.rollout.collection.driver.batches import Batches
from slipstream.rollout.collection.driver.collected_group import CollectedGroup
from slipstream.rollout.collection.driver.gate import LEAST_FAILURES, AdmissionGate, StalledRun
from slipstream.rollout.collection.driver.group_ledger import NoLedger
from slipstream.rollout.collection.driver.intake import Intake
from slipstream.rollout.control.consumption import OnStale, ReadyFirst
from slipstream.rollout.control.core import ControlError, RolloutControl, Ticket
from slipstream.rollout.control.ends import GroupCounts, Loss
from slipstream.rollout.control.slots import State
from slipstream.rollout.ledger.writing.transaction import Training
from slipstream.rollout.prompts import PromptSet, PromptStream
from slipstream.rollout.system.changes import Changes
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, TrajectoryHeader
from tests.unit.collecting import ready_group
from tests.unit.doubles import Listener
from tests.unit.driven_pool import settle


def header(*versions: int, reward: float = 1.0) -> TrajectoryHeader:
    """One prompt token, and one sampled token of each version."""
    runs = [(UNSAMPLED, False, 1), *((version, True, end) for end, version in enumerate(versions, 2))]
    return TrajectoryHeader(tuple(runs), Finish.STOP, reward=reward)


def group(ticket: Ticket, *versions: int) -> CollectedGroup:
    return ready_group(ticket.id, header(*(versions or (ticket.version,))))


def make(batch_size=1, eta=0, **more: Any) -> tuple[RolloutControl, AdmissionGate, Batches]:
    core = RolloutControl(batch_size, eta, **more)
    return core, *gate_of(core)


def gate_of(
    core: RolloutControl, journal=None, listener=None, ready=(), live=None, live_wait_s=0.0
) -> tuple[AdmissionGate, Batches]:
    stream = PromptStream(PromptSet.of([Prompt(i, f"prompt {i}") for i in range(5)]), shuffle=False, seed=0)
    ledger, listener = journal or NoLedger(), listener or Listener()
    gate = AdmissionGate(core, Intake(stream), ledger, listener, ready, live)
    return gate, Batches(gate, ledger, listener.note, live=live, live_wait_s=live_wait_s)


async def admitted(gate: AdmissionGate) -> tuple[Ticket, Prompt]:
    """Wait for a slot, as the collection loop does."""
    while not gate.may_admit():
        await gate.changed()
    return gate.admit()


async def slot(gate: AdmissionGate) -> Ticket:
    return (await admitted(gate))[0]


async def published(batches: Batches) -> None:
    await batches.step_begins()
    batches.published(batches.next_version)


async def cancelled(task: asyncio.Task) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
        raise AssertionError(f"{task} was cancelled, but returned {task.result()}")


def test_a_group_without_a_token_that_carries_loss_makes_no_step():
    listener = Listener()
    core = RolloutControl(1, 1)
    gate, batches = gate_of(core, listener=listener)

    async def run() -> None:
        ticket = await slot(gate)
        gate.finished([ready_group(ticket.id, header(0).without(frozenset({0})))])
        assert core.counts.filtered == 1
        assert [loss for loss, _ in listener.losses] == [Loss.FILTERED]
        other = await slot(gate)
        gate.finished([group(other)])
        assert [each.id for each in await batches.next(1)] == [other.id]

    clock.run(run())


# ---- slots


def test_a_slot_is_waited_for_until_its_version_is_published():
    async def main():
        _, gate, batches = make()
        first = await slot(gate)
        waiting = asyncio.create_task(slot(gate))
        gate.finished([group(first)])
        assert [g.id for g in await batches.next(1)] == [0]
        await batches.step_begins()
        await settle()
        assert not waiting.done()
        batches.published(1)
        assert await waiting == Ticket(id=1, version=1)

    clock.run(main())


@pytest.mark.parametrize("end", ["failed", "filtered"])
def test_a_slot_that_comes_free_goes_to_whoever_waits(end):
    async def main():
        core, gate, _ = make()
        first = await slot(gate)
        waiting = asyncio.create_task(slot(gate))
        await settle()
        gate.failed(first.id, "why") if end == "failed" else gate.filtered(first.id, [header(0)])
        assert (await waiting).id == 1
        assert core.counts.in_flight == 1

    clock.run(main())


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("free_first", [True, False])
def test_a_cancelled_wait_for_a_slot_charges_none(steps, free_first):
    """Cancelled before, at, and after the moment at which the slot comes free."""

    async def main():
        core, gate, _ = make()
        first = await slot(gate)
        waiting = asyncio.create_task(slot(gate))
        await settle()
        if free_first:
            gate.failed(first.id, "why")
        for _ in range(steps):
            await asyncio.sleep(0)
        if waiting.done():
            assert core.counts.in_flight == 1
            return
        waiting.cancel()
        if not free_first:
            gate.failed(first.id, "why")
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert core.counts.in_flight == 0
        assert (await asyncio.wait_for(slot(gate), 60)).id == 1

    clock.run(main())


def test_no_slot_is_given_without_asking():
    async def main():
        _, gate, _ = make()
        gate.admit()
        with pytest.raises(ControlError, match="no slot is free"):
            gate.admit()

    clock.run(main())


# ---- batches


def test_a_batch_is_delivered_whatever_came_first():
    async def main():
        _, gate, batches = make(batch_size=2)
        tickets = [await slot(gate), await slot(gate)]
        waiting = asyncio.create_task(batches.next(5))
        gate.finished([group(tickets[1])])
        await settle()
        assert not waiting.done()
        gate.finished([group(tickets[0])])
        assert [g.id for g in await waiting] == [0, 1]

    clock.run(main())


def test_a_time_out_names_what_was_waited_for():
    async def main():
        _, gate, batches = make(batch_size=3, eta=1)
        gate.finished([group(await slot(gate))])
        gate.filtered((await slot(gate)).id, [header(0)])
        gate.failed((await slot(gate)).id, "prompt 7: TypeError: oops")
        await slot(gate)
        expected = (
            r"no batch of 3 groups within 0 s: 2 in flight, 1 ready, 1 filtered, 1 failed "
            r"\(prompt 7: TypeError: oops\)"
        )
        with pytest.raises(StalledRun, match=expected):
            await batches.next(0.01)

    clock.run(main())


def test_failures_in_a_row_stall_the_run_and_name_the_last_one():
    async def main():
        _, gate, batches = make(batch_size=4, eta=2)
        waiting = asyncio.create_task(batches.next(5))
        for number in range(12):
            await settle()
            assert not waiting.done()
            gate.failed((await slot(gate)).id, f"failure {number}")
        with pytest.raises(StalledRun, match="12 groups in a row have failed; the last one: failure 11"):
            await waiting

    clock.run(main())


@pytest.mark.parametrize("end", ["finished", "filtered"])
def test_a_group_that_succeeds_ends_a_row_of_failures(end):
    async def main():
        _, gate, batches = make(batch_size=2, eta=3)
        tickets = [await slot(gate)]
        waiting = asyncio.create_task(batches.next(5))
        for turn in range(4):
            for _ in range(7):
                gate.failed((await slot(gate)).id, "why")
            await settle()
            assert not waiting.done(), turn
            last = await slot(gate)
            if end == "finished":
                gate.finished([group(last)])
            else:
                gate.filtered(last.id, [header(0)])
        gate.finished([group(tickets[0])])
        if end == "filtered":
            gate.finished([group(await slot(gate))])
        assert len(await waiting) == 2

    clock.run(main())


def test_one_bad_prompt_does_not_end_a_run_with_few_slots():
    async def main():
        _, gate, batches = make(batch_size=1, eta=0)
        waiting = asyncio.create_task(batches.next(5))
        for _ in range(LEAST_FAILURES - 1):
            gate.failed((await slot(gate)).id, "why")
            await settle()
        gate.finished([group(await slot(gate))])
        assert len(await waiting) == 1

    clock.run(main())


def test_a_refused_event_does_not_count_as_a_failure():
    async def main():
        _, gate, batches = make()
        for _ in range(LEAST_FAILURES):
            with pytest.raises(ControlError):
                gate.failed(9, "nobody generates it")
        gate.finished([group(await slot(gate))])
        assert len(await batches.next(1)) == 1

    clock.run(main())


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("finish_first", [True, False])
def test_a_cancelled_wait_for_a_batch_takes_none_and_is_cancelled(steps, finish_first):
    """A cancellation must also not be swallowed when the batch comes at the same instant."""

    async def main():
        core, gate, batches = make()
        ticket = await slot(gate)
        waiting = asyncio.create_task(batches.next(5))
        await settle()
        if finish_first:
            gate.finished([group(ticket)])
        for _ in range(steps):
            await asyncio.sleep(0)
        if waiting.done():
            assert len(waiting.result()) == 1
            return
        waiting.cancel()
        if not finish_first:
            gate.finished([group(ticket)])
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert core.ready == 1
        assert [g.id for g in await batches.next(1)] == [0]

    clock.run(main())


def test_a_batch_that_comes_at_the_instant_of_the_time_out_is_not_lost():
    async def main():
        for finishing_delay in np.linspace(0.004, 0.006, 40):
            core, gate, batches = make()
            ticket = await slot(gate)
            loop = asyncio.get_running_loop()
            loop.call_later(finishing_delay, gate.finished, [group(ticket)])
            try:
                batch = await batches.next(0.005)
            except StalledRun:
                await asyncio.sleep(0.002)
                assert core.ready == 1
                batch = await batches.next(1)
            assert [g.id for g in batch] == [0]

    clock.run(main())


@pytest.mark.parametrize("end", ["finished", "filtered", "failed", "published"])
def test_an_event_is_reported_although_its_task_is_being_cancelled(end):
    """A task that has been cancelled but not yet run still reports its group: events do not suspend."""

    async def main():
        core, gate, batches = make()
        ticket = await slot(gate)
        if end == "published":
            gate.finished([group(ticket)])
            await batches.next(1)
            await batches.step_begins()
        events = {
            "finished": lambda: gate.finished([group(ticket)]),
            "filtered": lambda: gate.filtered(ticket.id, [header(0)]),
            "failed": lambda: gate.failed(ticket.id, "why"),
            "published": lambda: batches.published(1),
        }

        async def report():
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            events[end]()

        await asyncio.wait({asyncio.create_task(report())})
        assert core.ready == (end == "finished")
        assert core.counts.filtered == (end == "filtered")
        assert core.counts.failed == (end == "failed")
        assert core.version == (end == "published")

    clock.run(main())


def test_two_trainers_cannot_take_batches_at_once():
    async def main():
        _, gate, batches = make(batch_size=1, eta=1)
        for _ in range(2):
            gate.finished([group(await slot(gate))])
        await batches.next(1)
        with pytest.raises(ControlError, match="neither published nor given back"):
            await batches.next(1)

    clock.run(main())


def test_an_ended_gate_gives_no_batch_to_those_who_wait_or_come():
    async def main():
        _, gate, batches = make()
        waiting = asyncio.create_task(batches.next(10))
        await settle()
        batches.end()
        assert await waiting == []
        gate.finished([group(await slot(gate))])
        assert await batches.next(10) == []

    clock.run(main())


# ---- what the ledger hears


class Written(NoLedger):
    """A journal that notes its events; ``flushed`` waits until it is let go."""

    def __init__(self) -> None:
        self.events: list[tuple] = []
        self.safe = asyncio.Event()

    def admitted(self, ticket, position):
        self.events.append(("admitted", ticket, position))

    def lost(self, id_, loss, tokens=0, note=""):
        self.events.append(("lost", id_, loss, tokens, note))

    def step_begins(self, version, parent, groups):
        self.events.append(("step_begins", version, parent, groups))

    def published(self, version, trainings):
        self.events.append(("published", version, trainings))

    async def flushed(self):
        await self.safe.wait()


def test_a_step_begins_when_the_ledger_knows_of_its_version():
    """Engines may hold the version from then on: its number must never be used again."""

    async def main():
        journal = Written()
        gate, batches = gate_of(RolloutControl(1, 0), journal)
        gate.finished([group(await slot(gate))])
        await batches.next(1)
        beginning = asyncio.create_task(batches.step_begins())
        await settle()
        assert not beginning.done()
        assert (gate.core.version, batches.next_version) == (0, 1)
        journal.safe.set()
        await beginning
        batches.published(1)
        assert journal.events == [
            ("admitted", Ticket(0, 0), 0),
            ("step_begins", 1, 0, [0]),
            ("published", 1, [Training(0, 0, 1, 0, 1, ((0, 1),))]),
        ]

    clock.run(main())


def test_the_account_of_a_training_has_every_sampled_token():
    async def main():
        journal = Written()
        journal.safe.set()
        core = RolloutControl(1, 1, consumption=ReadyFirst(OnStale.MASK))
        gate, batches = gate_of(core, journal)
        first, second = await slot(gate), await slot(gate)
        gate.finished([group(first)])
        for _ in range(2):
            await batches.next(1)
            await published(batches)
            gate.finished([group(await slot(gate))])
        gate.finished([group(second, 0, 1, 1)])
        [batch] = await batches.next(1)
        assert batch.headers[0].trained_tokens == {1: 2}, "the token of version 0 is too old"
        await published(batches)
        name, version, trainings = journal.events[-1]
        assert (name, version) == ("published", 3)
        assert trainings == [Training(second.id, 1, 2, 1, 3, ((1, 2),))]

    clock.run(main())


@pytest.mark.parametrize("end", ["failed", "filtered"])
def test_a_lost_group_is_written_down_with_its_tokens_and_the_listener_hears_of_it(end):
    async def main():
        journal, listener = Written(), Listener()
        gate, _ = gate_of(RolloutControl(1, 0), journal, listener)
        ticket = await slot(gate)
        headers = [header(0, 0, 0), header(0)]
        if end == "failed":
            gate.failed(ticket.id, "why", headers)
        else:
            gate.filtered(ticket.id, headers)
        note = "why" if end == "failed" else ""
        assert journal.events[-1] == ("lost", 0, Loss(end), 4, note)
        assert listener.losses == [(Loss(end), tuple(headers))]

    clock.run(main())


# ---- groups that expire


def test_work_on_an_expired_group_is_given_up_and_its_late_end_is_ignored():
    async def main():
        core = RolloutControl(1, 0, over_sampling=2)
        journal, listener = Written(), Listener()
        journal.safe.set()
        gate, batches = gate_of(core, journal, listener)
        first, second = await slot(gate), await slot(gate)
        await gate.changed()
        waiting = asyncio.create_task(gate.changed())
        gate.finished([group(first)])
        assert await waiting == []
        await batches.next(1)
        waiting = asyncio.create_task(gate.changed())
        await published(batches)
        assert await waiting == [second.id]
        assert not gate.core.is_open(second.id)
        assert listener.losses == [(Loss.SURPLUS, ())]
        assert journal.events[-1] == ("lost", second.id, Loss.SURPLUS, 0, "")
        gate.finished([group(second)])
        assert core.ready == 0
        assert len(journal.events) == 5

    clock.run(main())


@given(st.integers(0, 6))
def test_no_group_that_is_given_up_is_kept_from_the_collection_by_a_cancellation(steps):
    async def main():
        core = RolloutControl(1, 0, over_sampling=2)
        gate, batches = gate_of(core)
        first, second = await slot(gate), await slot(gate)
        gate.finished([group(first)])
        await gate.changed()
        await batches.next(1)
        waiting = asyncio.create_task(gate.changed())
        await settle()
        await published(batches)
        for _ in range(steps):
            await asyncio.sleep(0)
        waiting.cancel()
        (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
        expired = outcome if isinstance(outcome, list) else await asyncio.wait_for(gate.changed(), 60)
        assert expired == [second.id]

    clock.run(main())


def test_a_requeued_prompt_is_assigned_again():
    async def main():
        core = RolloutControl(1, 0, consumption=ReadyFirst(OnStale.REQUEUE), over_sampling=2)
        gate, batches = gate_of(core)
        first, slow = await admitted(gate), await admitted(gate)
        gate.finished([group(first[0])])
        await batches.next(1)
        await published(batches)
        gate.finished([group(slow[0])])
        waiting = asyncio.create_task(batches.next(1))
        await settle()
        again, fresh = await admitted(gate), await admitted(gate)
        assert again[0] == Ticket(2, 1, requeued_from=slow[0].id)
        assert again[1] == slow[1]
        assert fresh[1].id == 2
        assert batches.prompts_drawn == 3
        await cancelled(waiting)

    clock.run(main())


# ---- restarts


def test_groups_of_before_a_restart_are_assigned_first_at_their_own_prompts():
    async def main():
        stream = PromptStream(
            PromptSet.of([Prompt(i, "?") for i in range(9)]), shuffle=False, seed=0, position=3
        )
        core = RolloutControl(1, 2, counts=GroupCounts(6, 4))
        core.restore_unstarted(5)
        gate = AdmissionGate(core, Intake(stream, [(4, 1), (5, 2)]), NoLedger(), Listener())
        taken = [await admitted(gate) for _ in range(2)]
        assert [(ticket, prompt.id) for ticket, prompt in taken] == [(Ticket(5, 0), 2), (Ticket(6, 0), 3)]
        assert gate.core.states[State.GENERATING] == 2

    clock.run(main())


def test_groups_that_were_ready_before_a_restart_are_trained():
    async def main():
        core = RolloutControl(1, 2, counts=GroupCounts(1))
        assert core.restore_ready(0, {0})
        _, batches = gate_of(core, ready=[group(Ticket(0, 0))])
        assert [each.id for each in await batches.next(1)] == [0]

    clock.run(main())


# ---- waiting


def test_changes_wake_every_waiter_and_keep_none():
    async def main():
        changes, box = Changes(), []
        waiting = [asyncio.create_task(changes.first(lambda: box.pop() if box else None)) for _ in range(3)]
        await settle()
        box.extend(["a", "b"])
        changes.notify()
        await settle()
        assert sorted(task.result() for task in waiting if task.done()) == ["a", "b"]
        await cancelled(next(task for task in waiting if not task.done()))
        changes.notify()
        assert not changes._waiters

    clock.run(main())


def test_what_is_there_is_taken_without_suspending():
    async def main():
        taken = Changes().first(lambda: "it")
        with pytest.raises(StopIteration) as stop:
            taken.send(None)
        assert stop.value.value == "it"

    clock.run(main())


# ---- turns of live users


class Turns:
    """The turns of live users, as a batch needs them."""

    def __init__(self, core: RolloutControl) -> None:
        self._core = core
        self._then: list[Any] = []

    def become_ready(self, *ids: int) -> None:
        for id_ in ids:
            self._core.live.arrived(id_, [self._core.version])
            self._core.live.ready(id_)
        for then in self._then:
            then()

    def when_ready(self, then) -> None:
        self._then.append(then)

    def trajectories(self) -> list[Any]:
        return []

    def trained(self, batch) -> None:
        pass

    def settle(self) -> bool:
        return False


def test_while_no_turn_becomes_ready_batches_wait_for_a_tenth_of_the_time():
    core = RolloutControl(1, 1, live_trajectories=2)
    turns: Any = Turns(core)
    gate, batches = gate_of(core, live=turns, live_wait_s=60)

    async def run() -> None:
        now = asyncio.get_running_loop().time

        async def waited() -> float:
            gate.finished([group(await slot(gate))])
            began = now()
            assert len(await batches.next(1000)) == 1
            await published(batches)
            return now() - began

        assert [await waited() for _ in range(3)] == [60, 0, 0]
        await asyncio.sleep(530)
        assert await waited() == 0
        await asyncio.sleep(20)
        assert [await waited() for _ in range(2)] == [60, 0], (
            "in quick steps each turn expires before it is ready"
        )
        turns.become_ready(-1)
        assert [await waited() for _ in range(2)] == [60, 0], "a user has spoken: another one may"
        turns.become_ready(-2, -3)
        assert await waited() == 0, "nothing is missing"

    clock.run(run())


# ---- a step that has ended the trainer


@pytest.mark.parametrize(("others", "first"), [(1, [0, 1]), (2, [2, 3])])
def test_a_failed_batch_is_not_the_next_one_if_others_can_make_it(others: int, first: list[int]):
    """The next step tells whether the trainer fails with any batch. Then those that failed follow."""

    async def main() -> None:
        core, gate, _ = make(batch_size=2, eta=1)
        gate.finished([group(await slot(gate)) for _ in range(2 + others)])
        batches = Batches(gate, NoLedger(), Listener().note, failures=[(0, 1)])
        assert [each.id for each in await batches.next(1)] == first
        await published(batches)
        if others == 2:
            assert [each.id for each in await batches.next(1)] == [0, 1], "it has failed once only"
        else:
            assert core.ready == 1

    clock.run(main())


def test_a_search_for_a_culprit_goes_on_after_a_step_without_its_suspects():
    async def main() -> None:
        _, gate, _ = make(batch_size=2, eta=3)
        gate.finished([group(await slot(gate)) for _ in range(6)])
        batches = Batches(gate, NoLedger(), Listener().note, failures=[(0, 1), (0, 1)])
        taken = []
        for _ in range(2):
            taken.append([each.id for each in await batches.next(1)])
            await published(batches)
        assert taken == [[2, 3], [0, 4]]

    clock.run(main())
