"""The virtual clock: what asyncio promises holds, in the same order every time, and no time passes."""

import asyncio
import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.simulate import clock
from slipstream.backend.simulate.clock import SWEEP, Deadlock, Timers
from tests.unit.test_time_limit import now


def test_a_year_passes_at_once():
    async def main():
        await asyncio.sleep(365 * 86400)
        return now()

    assert clock.run(main()) == 365 * 86400


def test_sleepers_wake_in_the_order_of_their_times_and_then_of_asking():
    woken = []

    async def sleeper(name, seconds):
        await asyncio.sleep(seconds)
        woken.append((now(), name))

    async def main():
        async with asyncio.TaskGroup() as tasks:
            for name, seconds in (("a", 2), ("b", 1), ("c", 2), ("d", 0.5), ("e", 1)):
                tasks.create_task(sleeper(name, seconds))

    clock.run(main())
    assert woken == [(0.5, "d"), (1, "b"), (1, "e"), (2, "a"), (2, "c")]


def test_a_time_out_cancels_and_one_that_is_not_needed_does_nothing():
    async def main():
        async with asyncio.timeout(10):
            await asyncio.sleep(3)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await asyncio.sleep(3)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(100), 1)
        await asyncio.sleep(1000)
        return now()

    assert clock.run(main()) == 3 + 2 + 1 + 1000


def test_a_cancelled_sleep_sets_no_later_time():
    async def main():
        sleeper = asyncio.create_task(asyncio.sleep(50))
        await asyncio.sleep(1)
        sleeper.cancel()
        await asyncio.wait({sleeper})
        return now()

    assert clock.run(main()) == 1


def test_a_failure_in_a_group_cancels_the_others():
    async def fails():
        await asyncio.sleep(1)
        raise OSError("gone")

    async def main():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fails())
            tasks.create_task(asyncio.sleep(100))

    with pytest.raises(ExceptionGroup) as caught:
        clock.run(main())
    assert [str(error) for error in caught.value.exceptions] == ["gone"]


def test_a_deadlock_says_who_waits_where():
    async def inner(event):
        await event.wait()

    async def consumer(event):
        await inner(event)

    async def main():
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(consumer(asyncio.Event()))
            await asyncio.sleep(7)

    with pytest.raises(Deadlock) as caught:
        clock.run(main())
    told = str(caught.value)
    assert "at 7.000 s" in told
    assert "4 tasks wait" in told
    assert "3 x " in told
    assert "consumer" in told and "inner" in told and "Event.wait" in told


def test_each_new_time_is_announced_before_the_clock_shows_it():
    seen = []

    async def main():
        loop = asyncio.get_running_loop()
        loop.call_at(4, lambda: None)
        on_advance.loop = loop
        await asyncio.sleep(1)
        await asyncio.sleep(5)

    def on_advance(when):
        seen.append((on_advance.loop.time(), when))

    clock.run(main(), on_advance)
    assert seen == [(0, 1), (1, 4), (4, 6)]


def test_cyclic_garbage_is_collected_again_afterwards():
    assert gc.isenabled()

    async def main():
        return gc.isenabled()

    assert clock.run(main()) is False
    assert gc.isenabled()
    gc.disable()
    try:
        clock.run(main())
        assert not gc.isenabled()
    finally:
        gc.enable()


# ---- timers

SCRIPT = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.floats(0, 100)),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
        st.tuples(st.just("take"), st.just(0)),
    ),
    max_size=80,
)


@given(SCRIPT)
def test_timers_fire_as_a_sorted_list_of_them_would(script):
    timers, reference, added, at = Timers(), [], [], 0.0
    for action, value in script:
        if action == "add":
            number = len(added)
            added.append(timers.add(at + value, int, (number,)))
            reference.append((at + value, number))
        elif action == "cancel" and value < len(added):
            added[value].cancel()
            assert added[value].cancelled()
            reference = [timer for timer in reference if timer[1] != value]
        elif action == "take":
            due = timers.take()
            if not reference:
                assert due is None
                continue
            at = min(reference)[0]
            expected = [timer for timer in sorted(reference) if timer[0] == at]
            assert due is not None
            assert due[0] == at
            assert [call[1][0] for call in due[1] if not call.cancelled()] == [n for _, n in expected]
            reference = [timer for timer in reference if timer[0] != at]


def test_cancelled_timers_do_not_pile_up():
    timers = Timers()
    for number in range(20 * SWEEP):
        timers.add(600.0 + number, int, ()).cancel()
        timers.add(float(number % 7), int, ()).cancel()
    assert len(timers) <= 2 * SWEEP
