"""The admission gate: waits that end, and cancellations that lose nothing."""

import asyncio
from contextlib import suppress

import numpy as np
import pytest

from slipstream.rollout.changes import Changes
from slipstream.rollout.collect.gate import LEAST_FAILURES, AdmissionGate, StalledRun
from slipstream.rollout.collect.intake import Intake
from slipstream.rollout.collect.journal import NoJournal
from slipstream.rollout.collect.running import RunningGroups
from slipstream.rollout.control.consumption import OnStale, ReadyFirst
from slipstream.rollout.control.core import ControlError, Expired, GroupCounts, Loss, RolloutControl, Ticket
from slipstream.rollout.ledger.recovery import OpenGroup
from slipstream.rollout.prompts import PromptStream
from slipstream.rollout.trajectory import Finish, Group, Prompt, Trajectory
from tests.unit.doubles import Listener


def group(ticket: Ticket) -> Group:
    tokens = np.zeros(1, np.int64)
    trajectory = Trajectory(tokens, tokens == 0, tokens, tokens, Finish.STOP, reward=1.0)
    return Group(ticket.id, Prompt(0, "?"), ticket.version, (trajectory,))


def make(batch_size=1, eta=0) -> tuple[RolloutControl, AdmissionGate]:
    core = RolloutControl(batch_size, eta)
    return core, gate_of(core)


def gate_of(core: RolloutControl, journal=None, listener=None, running=None) -> AdmissionGate:
    stream = PromptStream([Prompt(i, f"prompt {i}") for i in range(5)], shuffle=False, seed=0)
    return AdmissionGate(
        core, Intake(stream), journal or NoJournal(), listener or Listener(), running or RunningGroups()
    )


async def slot(gate: AdmissionGate) -> Ticket:
    return (await gate.slot()).ticket


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def cancelled(task: asyncio.Task) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
        raise AssertionError(f"{task} was cancelled, but returned {task.result()}")


def test_a_slot_is_waited_for_until_its_version_is_published():
    async def main():
        _, gate = make()
        first = await slot(gate)
        waiting = asyncio.create_task(slot(gate))
        await gate.finished(group(first))
        assert [g.id for g in await gate.batch(1)] == [0]
        await settle()
        assert not waiting.done()
        gate.published(1)
        assert await waiting == Ticket(id=1, version=1)

    asyncio.run(main())


@pytest.mark.parametrize("end", ["failed", "filtered"])
def test_a_slot_that_comes_free_goes_to_the_waiter(end):
    async def main():
        core, gate = make()
        first = await slot(gate)
        waiting = asyncio.create_task(slot(gate))
        await settle()
        gate.failed(first, "why") if end == "failed" else gate.filtered(group(first))
        assert (await waiting).id == 1
        assert core.counts.in_flight == 1

    asyncio.run(main())


def test_slots_go_to_waiters_in_the_order_of_their_asking():
    async def main():
        _, gate = make()
        tickets = [await slot(gate)]
        waiting = [asyncio.create_task(slot(gate)) for _ in range(4)]
        for task in waiting:
            await settle()
            gate.failed(tickets[-1], "why")
            tickets.append(await task)
        assert [ticket.id for ticket in tickets] == [0, 1, 2, 3, 4]

    asyncio.run(main())


def test_a_batch_is_delivered_whatever_came_first():
    async def main():
        _, gate = make(batch_size=2)
        tickets = [await slot(gate), await slot(gate)]
        waiting = asyncio.create_task(gate.batch(5))
        await gate.finished(group(tickets[1]))
        await settle()
        assert not waiting.done()
        await gate.finished(group(tickets[0]))
        assert [g.id for g in await waiting] == [0, 1]

    asyncio.run(main())


def test_a_time_out_names_what_was_waited_for():
    async def main():
        _, gate = make(batch_size=3, eta=1)
        await gate.finished(group(await slot(gate)))
        gate.filtered(group(await slot(gate)))
        gate.failed(await slot(gate), "prompt 7: TypeError: oops")
        await slot(gate)
        expected = (
            r"no batch of 3 groups within 0 s: 2 in flight, 1 ready, 1 filtered, 1 failed "
            r"\(prompt 7: TypeError: oops\)"
        )
        with pytest.raises(StalledRun, match=expected):
            await gate.batch(0.01)

    asyncio.run(main())


def test_failures_in_a_row_stall_the_run_and_name_the_last_one():
    async def main():
        _, gate = make(batch_size=4, eta=2)
        waiting = asyncio.create_task(gate.batch(5))
        for number in range(12):
            await settle()
            assert not waiting.done()
            gate.failed(await slot(gate), f"failure {number}")
        with pytest.raises(StalledRun, match="12 groups in a row have failed; the last one: failure 11"):
            await waiting

    asyncio.run(main())


@pytest.mark.parametrize("end", ["finished", "filtered"])
def test_a_group_that_succeeds_ends_a_row_of_failures(end):
    async def main():
        _, gate = make(batch_size=2, eta=3)
        tickets = [await slot(gate)]
        waiting = asyncio.create_task(gate.batch(5))
        for turn in range(4):
            for _ in range(7):
                gate.failed(await slot(gate), "why")
            await settle()
            assert not waiting.done(), turn
            last = await slot(gate)
            if end == "finished":
                await gate.finished(group(last))
            else:
                gate.filtered(group(last))
        await gate.finished(group(tickets[0]))
        if end == "filtered":
            await gate.finished(group(await slot(gate)))
        assert len(await waiting) == 2

    asyncio.run(main())


def test_one_bad_prompt_does_not_end_a_run_with_few_slots():
    async def main():
        _, gate = make(batch_size=1, eta=0)
        waiting = asyncio.create_task(gate.batch(5))
        for _ in range(LEAST_FAILURES - 1):
            gate.failed(await slot(gate), "why")
            await settle()
        await gate.finished(group(await slot(gate)))
        assert len(await waiting) == 1

    asyncio.run(main())


def test_a_refused_event_does_not_count_as_a_failure():
    async def main():
        _, gate = make()
        for _ in range(LEAST_FAILURES):
            with pytest.raises(ControlError):
                gate.failed(Ticket(9, 0), "nobody generates it")
        await gate.finished(group(await slot(gate)))
        assert len(await gate.batch(1)) == 1

    asyncio.run(main())


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("free_first", [True, False])
def test_a_cancelled_wait_for_a_slot_charges_none(steps, free_first):
    """Cancelled before, at, and after the moment at which the slot comes free."""

    async def main():
        core, gate = make()
        first = await slot(gate)
        waiting = asyncio.create_task(slot(gate))
        await settle()
        if free_first:
            gate.failed(first, "why")
        for _ in range(steps):
            await asyncio.sleep(0)
        if waiting.done():
            assert core.counts.in_flight == 1
            return
        waiting.cancel()
        if not free_first:
            gate.failed(first, "why")
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert core.counts.in_flight == 0
        assert (await asyncio.wait_for(slot(gate), 1)).id == 1

    asyncio.run(main())


def test_a_free_slot_is_not_lost_with_the_waiter_that_is_cancelled():
    async def main():
        core, gate = make()
        first = await slot(gate)
        one, other = asyncio.create_task(slot(gate)), asyncio.create_task(slot(gate))
        await settle()
        gate.failed(first, "why")
        one.cancel()
        assert (await asyncio.wait_for(other, 1)).id == 1
        assert one.cancelled()
        assert core.counts.in_flight == 1

    asyncio.run(main())


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("finish_first", [True, False])
def test_a_cancelled_wait_for_a_batch_takes_none_and_is_cancelled(steps, finish_first):
    """A cancellation must also not be swallowed when the batch comes at the same instant."""

    async def main():
        core, gate = make()
        ticket = await slot(gate)
        waiting = asyncio.create_task(gate.batch(5))
        await settle()
        if finish_first:
            await gate.finished(group(ticket))
        for _ in range(steps):
            await asyncio.sleep(0)
        if waiting.done():
            assert len(waiting.result()) == 1
            return
        waiting.cancel()
        if not finish_first:
            await gate.finished(group(ticket))
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert core.ready == 1
        assert [g.id for g in await gate.batch(1)] == [0]

    asyncio.run(main())


def test_a_batch_that_comes_at_the_instant_of_the_time_out_is_not_lost():
    async def main():
        for finishing_delay in np.linspace(0.004, 0.006, 40):
            core, gate = make()
            ticket = await slot(gate)
            loop = asyncio.get_running_loop()
            loop.call_later(finishing_delay, lambda: loop.create_task(gate.finished(group(ticket))))  # noqa: B023
            try:
                batch = await gate.batch(0.005)
            except StalledRun:
                await asyncio.sleep(0.002)
                assert core.ready == 1
                batch = await gate.batch(1)
            assert [g.id for g in batch] == [0]

    asyncio.run(main())


@pytest.mark.parametrize("end", ["finished", "filtered", "failed", "published"])
def test_an_event_is_reported_although_its_task_is_being_cancelled(end):
    """A task that has been cancelled but not yet run still reports its group: events do not suspend."""

    async def main():
        core, gate = make()
        ticket = await slot(gate)
        if end == "published":
            await gate.finished(group(ticket))
            await gate.batch(1)
        events = {
            "finished": lambda: gate.finished(group(ticket)),
            "filtered": lambda: gate.filtered(group(ticket)),
            "failed": lambda: gate.failed(ticket, "why"),
            "published": lambda: gate.published(1),
        }
        waiters = [asyncio.create_task(slot(gate)) for _ in range(3)]

        async def report():
            asyncio.current_task().cancel()
            if (suspending := events[end]()) is not None:
                await suspending

        await settle()
        reporting = asyncio.create_task(report())
        await asyncio.wait({reporting})
        assert core.ready == (end == "finished")
        assert core.counts.filtered == (end == "filtered")
        assert core.counts.failed == (end == "failed")
        assert core.version == (end == "published")
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)

    asyncio.run(main())


def test_two_trainers_cannot_take_batches_at_once():
    async def main():
        _, gate = make(batch_size=1, eta=1)
        for _ in range(2):
            await gate.finished(group(await slot(gate)))
        await gate.batch(1)
        with pytest.raises(ControlError, match="has not been published"):
            await gate.batch(1)

    asyncio.run(main())


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

    asyncio.run(main())


def test_what_is_there_is_taken_without_suspending():
    async def main():
        taken = Changes().first(lambda: "it")
        with pytest.raises(StopIteration) as stop:
            taken.send(None)
        assert stop.value.value == "it"

    asyncio.run(main())


class Written:
    """A journal that notes the names of its events; ``flushed`` waits until it is let go."""

    def __init__(self) -> None:
        self.events: list[tuple] = []
        self.safe = asyncio.Event()

    def __getattr__(self, name):
        return lambda *args: self.events.append((name, *args))

    async def flushed(self):
        await self.safe.wait()


def test_an_ended_gate_gives_no_batch_to_those_who_wait_or_come():
    async def main():
        _, gate = make()
        waiting = asyncio.create_task(gate.batch(10))
        await settle()
        gate.end()
        assert await waiting == []
        await gate.finished(group(await slot(gate)))
        assert await gate.batch(10) == []

    asyncio.run(main())


def test_a_group_is_not_trained_before_the_journal_is_safe():
    async def main():
        core = RolloutControl(1, 0)
        journal = Written()
        gate = gate_of(core, journal)
        assignment = await gate.slot()
        assert (assignment.ticket, assignment.prompt.id) == (Ticket(0, 0), 0)
        one = group(assignment.ticket)
        finishing = asyncio.create_task(gate.finished(one))
        await settle()
        assert core.ready == 0
        journal.safe.set()
        await finishing
        assert await gate.batch(1) == [one]
        await gate.step_begins()
        gate.published(1)
        assert journal.events == [
            ("admitted", Ticket(0, 0), 0),
            ("ready", one),
            ("step_begins", 1, 1),
            ("published", 1, [one]),
        ]

    asyncio.run(main())


def test_work_on_an_expired_group_is_abandoned_and_its_late_end_is_ignored():
    async def main():
        core = RolloutControl(1, 0, over_sampling=2)
        journal, listener, running = Written(), Listener(), RunningGroups()
        journal.safe.set()
        gate = gate_of(core, journal, listener, running)
        first, second = await slot(gate), await slot(gate)
        work = asyncio.create_task(asyncio.sleep(60))
        running.add(second.id, work)
        await gate.finished(group(first))
        await gate.batch(1)
        gate.published(1)
        await asyncio.wait({work}, timeout=1)
        assert work.cancelled()
        assert listener.losses == [(Loss.SURPLUS, ())]
        assert journal.events[-1] == ("expired", Expired(second.id, Loss.SURPLUS, None))
        await gate.finished(group(second))
        gate.judging(second)
        assert core.ready == 0

    asyncio.run(main())


def test_a_requeued_prompt_is_assigned_again():
    async def main():
        core = RolloutControl(1, 0, consumption=ReadyFirst(OnStale.REQUEUE), over_sampling=2)
        gate = gate_of(core)
        first, slow = await gate.slot(), await gate.slot()
        await gate.finished(group(first.ticket))
        await gate.batch(1)
        gate.published(1)
        await gate.finished(group(slow.ticket))
        waiting = asyncio.create_task(gate.batch(1))
        await settle()
        again, fresh = await gate.slot(), await gate.slot()
        assert again.ticket == Ticket(2, 1, requeued_from=slow.ticket.id)
        assert again.prompt == slow.prompt
        assert fresh.prompt.id == 2
        assert gate.position == 3
        await cancelled(waiting)

    asyncio.run(main())


def test_groups_of_before_a_restart_are_assigned_first_with_what_they_had():
    async def main():
        found = [OpenGroup(4, 1, False), OpenGroup(5, 2, False)]
        stream = PromptStream([Prompt(i, "?") for i in range(9)], shuffle=False, seed=0, position=3)
        intake = Intake(stream, found)
        core = RolloutControl(1, 2, version=6, counts=GroupCounts(6, 4))
        intake.resume(core.restore_open(4, 5), found[0])
        core.restore_unstarted(5)
        gate = AdmissionGate(core, intake, NoJournal(), Listener(), RunningGroups())
        taken = [await gate.slot() for _ in range(3)]
        assert [(a.ticket, a.prompt.id, a.prior) for a in taken] == [
            (Ticket(4, 5), 1, found[0]),
            (Ticket(5, 6), 2, None),
            (Ticket(6, 6), 3, None),
        ]

    asyncio.run(main())
