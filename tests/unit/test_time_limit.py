"""A time limit that many tasks share does what ``asyncio.timeout`` does for each of them."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.simulate import clock
from slipstream.rollout.system.time_limit import TimeLimit
from tests.unit.collecting import run_with_contexts as run


def now() -> float:
    return asyncio.get_running_loop().time()


async def limited(limit: TimeLimit, start_s: float, takes_s: float) -> tuple[str, float]:
    await asyncio.sleep(start_s)
    try:
        with limit():
            await asyncio.sleep(takes_s)
    except TimeoutError as error:
        return str(error), now()
    return "done", now()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12))
def test_each_task_ends_when_it_is_done_or_its_own_time_is_up(tasks):
    async def main():
        limit = TimeLimit(10)
        return await asyncio.gather(*(limited(limit, start, takes) for start, takes in tasks))

    for (start, takes), (said, at) in zip(tasks, clock.run(main()), strict=True):
        if takes != 10:  # else both happen in the same instant
            assert (said, at) == (
                ("done", start + takes) if takes < 10 else ("not done within 10 s", start + 10)
            )


def test_there_is_one_timer_for_all_and_nothing_is_left_behind():
    async def main():
        loop, limit, timers = asyncio.get_running_loop(), TimeLimit(60), []
        call_at, loop.call_at = loop.call_at, lambda *args: timers.append(args[0]) or call_at(*args)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(1000):
                tasks.create_task(limited(limit, 0, 0))
        return timers, limit

    timers, limit = asyncio.run(main())
    assert len(timers) == 1
    assert not limit.entered


def test_a_task_may_use_it_again_and_within_itself():
    async def main():
        limit = TimeLimit(10)
        with limit():
            await asyncio.sleep(6)
        with limit():
            await asyncio.sleep(6)
            with limit():
                with pytest.raises(TimeoutError), TimeLimit(1)():
                    await asyncio.sleep(2)
                await asyncio.sleep(2)
        return now()

    assert clock.run(main()) == 6 + 6 + 1 + 2


def test_a_cancellation_from_elsewhere_stays_one():
    async def main():
        task = asyncio.create_task(limited(TimeLimit(10), 0, 100))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    clock.run(main())


def test_so_it_does_when_the_time_is_up_in_the_same_instant():
    async def main():
        task = asyncio.create_task(limited(TimeLimit(10), 0, 100))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_at(10, task.cancel)  # behind the limit's own timer
        with pytest.raises(asyncio.CancelledError):
            await task

    clock.run(main())


def test_a_block_that_fails_raises_what_it_raised():
    async def main():
        with pytest.raises(OSError, match="gone"), TimeLimit(10)():
            raise OSError("gone")
        await asyncio.sleep(100)
        return now()

    assert clock.run(main()) == 100


def test_a_block_that_overstays_and_then_ends_by_itself_has_ended():
    async def main():
        with TimeLimit(1)(), pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(5)
        assert not asyncio.current_task().cancelling()
        return now()

    assert clock.run(main()) == 1


def test_it_is_for_tasks_only():
    with pytest.raises(RuntimeError), TimeLimit(1)():
        pass


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=4),
)
def test_time_that_is_stopped_counts_for_nobody(tasks, stops):
    """``stops``: how long time passes, and how long it stands still then, again and again."""

    async def main():
        limit = TimeLimit(10)

        async def stopping():
            for after, takes in stops:
                await asyncio.sleep(after + 0.25)
                limit.stop(True)
                limit.stop(True)
                await asyncio.sleep(takes)
                limit.stop(False)

        async with asyncio.TaskGroup() as group:
            group.create_task(stopping())
            return await asyncio.gather(*(limited(limit, start, takes) for start, takes in tasks))

    stood, time = [], 0.0
    for after, takes in stops:
        stood.append((time + after + 0.25, time + after + 0.25 + takes))
        time = stood[-1][1]

    def due(start: float) -> float:
        """The first instant behind which 10 s have passed that count."""
        left, at = 10.0, float(start)
        for begin, end in stood:
            if end <= at:
                continue
            counted = max(0.0, begin - at)
            if counted >= left:
                break
            left, at = left - counted, end
        return at + left

    for (start, takes), (said, at) in zip(tasks, clock.run(main()), strict=True):
        end = due(start)
        if start + takes != end:
            expected = ("done", start + takes) if start + takes < end else ("not done within 10 s", end)
            assert (said, at) == pytest.approx(expected)


def test_stopping_nothing_and_letting_go_on_what_was_not_stopped_do_nothing():
    async def main():
        limit = TimeLimit(10)
        limit.stop(False)
        limit.stop(True)
        await asyncio.sleep(5)
        limit.stop(False)
        return await limited(limit, 0, 100)

    assert clock.run(main()) == ("not done within 10 s", 15)


# ---- time that is spent on judging


async def within(limit: TimeLimit, work: Awaitable[None]) -> tuple[str, float]:
    """Do some work of this task within the limit. Return how it has ended, and when."""
    try:
        with limit():
            await work
    except TimeoutError:
        return "late", now()
    return "done", now()


async def judged(limit: TimeLimit, takes_s: float) -> None:
    with limit.suspended():
        await asyncio.sleep(takes_s)


def test_the_clock_of_a_task_stands_still_while_it_is_suspended_and_begins_anew_behind_that():
    async def work(limit: TimeLimit) -> None:
        for _ in range(2):
            await asyncio.sleep(9)
            await judged(limit, 100)
        assert now() == 218
        await asyncio.sleep(100)

    async def main():
        limit = TimeLimit(10)
        return await within(limit, work(limit))

    assert run(main()) == ("late", 228)


def test_suspending_one_task_does_not_hold_up_the_others():
    async def work(limit: TimeLimit) -> None:
        await judged(limit, 50)
        await asyncio.sleep(100)

    async def main():
        limit = TimeLimit(10)
        others = (limited(limit, start, 100) for start in (1, 30))
        return await asyncio.gather(within(limit, work(limit)), *others)

    first, second, third = run(main())
    assert first == ("late", 60)
    assert (second, third) == (("not done within 10 s", 11), ("not done within 10 s", 40))


def test_tasks_that_an_episode_has_started_suspend_it_and_the_last_one_lets_it_go_on():
    async def work(limit: TimeLimit) -> None:
        await asyncio.gather(judged(limit, 30), judged(limit, 50))
        await asyncio.sleep(100)

    async def main():
        limit = TimeLimit(10)
        return await within(limit, work(limit))

    assert run(main()) == ("late", 60)


def test_a_task_that_outlasts_its_episode_brings_no_clock_back():
    async def main():
        limit = TimeLimit(10)
        with limit():
            left = asyncio.create_task(judged(limit, 30))
            await asyncio.sleep(1)
        await left
        assert not limit.entered
        await asyncio.sleep(100)

    run(main())


def test_a_block_that_has_ended_keeps_no_earlier_task_alive():
    """A task may be started inside the block of another one, and so on without end."""

    async def main():
        limit, is_last, tasks = TimeLimit(60), asyncio.Event(), weakref.WeakSet()

        async def episode(number: int) -> None:
            with limit():
                if number == 5:
                    is_last.set()
                    await asyncio.sleep(10)
                tasks.add(asyncio.create_task(episode(number + 1)))

        tasks.add(asyncio.create_task(episode(0)))
        await is_last.wait()
        gc.collect()
        return sum(task.done() for task in tasks)

    assert asyncio.run(main()) == 0


def test_suspending_outside_of_any_limit_does_nothing():
    async def main():
        limit = TimeLimit(10)
        with limit.suspended():
            await asyncio.sleep(100)
        return now()

    assert run(main()) == 100


def test_a_task_that_is_cancelled_while_it_is_suspended_leaves_nothing_behind():
    async def suspended(limit: TimeLimit) -> None:
        with limit(), limit.suspended():
            await asyncio.sleep(100)

    async def main():
        limit = TimeLimit(10)
        task = asyncio.create_task(suspended(limit))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not limit.entered
        await asyncio.sleep(100)

    run(main())


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), max_size=5), st.integers(0, 30))
def test_only_time_behind_the_last_suspension_counts(parts, rest):
    """``parts``: seconds of work, each followed by seconds of judging."""

    async def work(limit: TimeLimit) -> None:
        for work_s, judging_s in parts:
            await asyncio.sleep(work_s)
            await judged(limit, judging_s)
        await asyncio.sleep(rest)

    async def main():
        limit = TimeLimit(10)
        return await within(limit, work(limit))

    began = sum(map(sum, parts))
    if rest != 10:
        assert run(main()) == (("done", began + rest) if rest < 10 else ("late", began + 10))
