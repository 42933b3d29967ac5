"""A slow engine gets fewer requests than the others; differences that mean nothing change nothing."""

import asyncio

import pytest

from slipstream.backend.simulate import clock
from slipstream.rollout.engine.pace import FORGET_S, REQUESTS, Pace, weights
from tests.unit.driven_pool import Driver, FakeEngine, settle, start, whole


def pace(*requests: tuple[float, int], at_s: float = 0.0) -> Pace:
    found = Pace()
    for seconds, tokens in requests:
        found.took(seconds, tokens, at_s)
    return found


def test_a_slow_engine_counts_by_how_much_slower_it_is():
    fast, slow = pace(*[(1.0, 100)] * 5), pace(*[(10.0, 100)] * 5)
    assert weights([fast, slow], 0.0) == [1.0, pytest.approx(10.0)]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (pace(*[(2.5, 100)] * 5), "chance"),
        (pace(*[(10.0, 100)] * (REQUESTS - 1)), "too few requests"),
        (pace(*[(10.0, 0)] * 5), "no token"),
        (pace(*[(0.05, 100)] * 5), "too little time"),
    ],
)
def test_a_difference_that_may_mean_nothing_changes_nothing(other, why):
    fast = pace(*[(0.01, 100)] * 5) if why == "too little time" else pace(*[(1.0, 100)] * 5)
    assert weights([fast, other], 0.0) == [1.0, 1.0], why


def test_an_engine_that_has_become_fast_again_counts_as_fast():
    fast, slow = pace(*[(1.0, 100)] * 5), pace(*[(10.0, 100)] * 5)
    for _ in range(15):
        slow.took(1.0, 100, 0.0)
    assert weights([fast, slow], 0.0) == [1.0, 1.0]


def test_what_is_known_of_an_engine_is_forgotten():
    fast, slow = pace(*[(1.0, 100)] * 5, at_s=FORGET_S), pace(*[(10.0, 100)] * 5)
    assert weights([fast, slow], FORGET_S) == [1.0, pytest.approx(10.0)]
    assert weights([fast, slow], FORGET_S + 1) == [1.0, 1.0]


def test_a_slow_engine_gets_a_request_when_the_others_have_as_many_more_and_is_tried_again():
    async def main():
        fast, slow = FakeEngine("fast"), FakeEngine("slow")
        driver = Driver(slow, fast, max_concurrent=100)
        for _ in range(REQUESTS):
            start(driver, 2)
            await settle()
            assert (slow.running, fast.running) == (1, 1)
            await asyncio.sleep(0.1)
            fast.end(whole(1, 2))
            await asyncio.sleep(0.9)
            slow.end(whole(1, 2))
            await settle()
        start(driver, 9)
        await settle()
        assert (slow.running, fast.running) == (0, 9)
        start(driver, 2)
        await settle()
        assert slow.running == 1, "ten times as many wait for the other one"
        slow.end(whole(1, 2))
        fast.end(whole(1, 2), n=10)
        await asyncio.sleep(FORGET_S + 1)
        start(driver)
        await settle()
        assert (slow.running, fast.running) == (1, 0)
        slow.end()
        await settle()

    clock.run(main())
