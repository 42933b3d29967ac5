"""The engine pool follows the records of the driver: in order, as a whole, and at once."""

import asyncio

import msgspec

from slipstream.backend.simulate import clock
from slipstream.rollout.engine.client import EngineLost
from slipstream.rollout.engine.routing import LostEngine
from tests.unit.driven_pool import (
    COMPLETION,
    Driver,
    FakeEngine,
    asked,
    part,
    settle,
    start,
    whole,
)


def test_of_records_that_arrive_out_of_order_the_one_with_the_largest_number_counts():
    async def main():
        first, second = FakeEngine("first"), FakeEngine("second")
        driver = Driver(first)
        old = driver.record
        driver.remove(first)
        driver.add(second)
        driver.send(version=4)
        pool = driver.pool
        pool.follow(old)
        pool.follow(msgspec.structs.replace(old, number=pool.status().number, version=9, limit=1))
        assert pool.status().number == driver.record.number
        assert pool.version == 4
        start(driver, 2)
        await settle()
        assert (first.running, second.running) == (0, 2)

    clock.run(main())


def test_records_that_were_missed_are_not_missing():
    async def main():
        first, second = FakeEngine("first"), FakeEngine("second")
        driver = Driver(first)
        (task,) = start(driver)
        await settle()
        follow, driver.pool.follow = driver.pool.follow, lambda _: None
        driver.send(version=1, held=True)
        driver.remove(first)
        driver.send(held=False, limit=1)
        driver.add(second)
        follow(driver.record)
        await settle()
        assert (first.closed, second.running) == (1, 1), "the request has gone on"
        assert second.asked[0]["version"] == 1
        second.end()
        assert await task == COMPLETION

    clock.run(main())


def test_requests_of_an_engine_that_the_driver_has_given_up_go_on_elsewhere_at_once():
    async def main():
        gone, other = FakeEngine("gone"), FakeEngine("other")
        driver = Driver(gone)
        (task,) = start(driver)
        await settle()
        gone.grow(part(1))
        driver.add(other)
        driver.remove(gone)
        await settle()
        assert other.asked == [asked([7, 1], 3)]
        assert driver.lost == []
        other.end(whole(2))
        assert await task == whole(1, 2)

    clock.run(main())


def test_a_server_that_was_started_again_is_another_engine():
    """Its requests from before end, its load begins at none, and it is connected to anew."""

    async def main():
        old, new = FakeEngine("engine"), FakeEngine("engine")
        driver = Driver(old)
        (task,) = start(driver)
        await settle()
        del driver._serving[old]
        driver.add(new)
        await settle()
        assert (old.closed, old.running, new.running) == (1, 0, 1)
        new.end()
        assert await task == COMPLETION

    clock.run(main())


def test_a_late_loss_of_a_server_is_not_held_against_its_next_start():
    async def main():
        old, new = FakeEngine("engine"), FakeEngine("engine")
        old.ignores_close = True
        driver = Driver(old)
        (task,) = start(driver)
        await settle()
        del driver._serving[old]
        driver.add(new)
        old.end(EngineLost("gone"))
        await settle()
        assert driver.lost == []
        assert new.running == 1
        new.end(EngineLost("gone"))
        await settle()
        assert driver.pool.status().lost == (LostEngine("engine", 2, "it does not answer"),)
        task.cancel()

    clock.run(main())


def test_an_engine_that_is_lost_serves_again_after_its_next_start():
    async def main():
        old, new = FakeEngine("engine"), FakeEngine("engine")
        driver = Driver(old)
        (task,) = start(driver)
        await settle()
        old.end(EngineLost("gone"))
        await settle()
        del driver._serving[old]
        driver.add(new)
        await settle()
        assert driver.lost == []
        new.end()
        assert await task == COMPLETION

    clock.run(main())


def test_a_record_that_repeats_an_engine_keeps_its_connection_and_its_load():
    async def main():
        first, other = FakeEngine("first"), FakeEngine("other")
        driver = Driver(first)
        start(driver, 2)
        await settle()
        driver.add(other)
        start(driver, 2)
        await settle()
        assert (first.running, other.running, first.closed) == (2, 2, 0)

    clock.run(main())


def test_the_driver_is_told_which_record_is_in_force():
    async def main():
        driver = Driver()
        for _ in range(3):
            before = driver.reports
            driver.send()
            assert driver.reports == before + 1
            assert driver.pool.status().number == driver.record.number

    clock.run(main())


def test_closing_a_pool_closes_every_connection():
    async def main():
        engines = [FakeEngine("a"), FakeEngine("b"), FakeEngine("c")]
        driver = Driver(*engines)
        driver.remove(engines[0])
        await driver.pool.close()
        assert [engine.closed for engine in engines] == [1, 1, 1]
        assert len(asyncio.all_tasks()) == 1

    clock.run(main())


# ---- the limit, and holding requests back


def test_the_limit_may_change_while_requests_run():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine, max_concurrent=4)
        tasks = start(driver, 6)
        await settle()
        driver.send(limit=2)
        assert (engine.running, driver.pool.status().in_use) == (4, 4)
        engine.end(n=2)
        await settle()
        assert engine.running == 2
        driver.send(limit=3)
        await settle()
        assert engine.running == 3
        for _ in range(2):
            engine.end(n=3)
            await settle()
        assert await asyncio.gather(*tasks) == [COMPLETION] * 6

    clock.run(main())


def test_while_requests_are_held_new_ones_wait_however_long_and_running_ones_end():
    async def main():
        engines = [FakeEngine("a"), FakeEngine("b")]
        driver = Driver(*engines, wait_timeout_s=0.02)
        old = start(driver, 2)
        await settle()
        driver.send(held=True)
        new = start(driver, 4)
        engines[0].end()
        await settle()
        assert driver.pool.status().running == 1
        reports = driver.reports
        engines[1].end()
        assert await asyncio.gather(*old) == [COMPLETION] * 2
        assert driver.pool.status().running == 0
        assert driver.reports == reports + 1, "the driver waits for this"
        await asyncio.sleep(0.05)
        assert [engine.running for engine in engines] == [0, 0]
        assert not any(task.done() for task in new), "longer than requests wait for an engine"
        driver.send(held=False)
        await settle()
        assert [engine.running for engine in engines] == [2, 2]
        for engine in engines:
            engine.end(n=2)
        assert await asyncio.gather(*new) == [COMPLETION] * 4

    clock.run(main())


def test_what_is_interrupted_while_requests_are_held_is_continued_afterwards():
    async def main():
        lost, other = FakeEngine("lost"), FakeEngine("other")
        driver = Driver(lost)
        (task,) = start(driver)
        await settle()
        driver.send(held=True)
        reports = driver.reports
        lost.end(EngineLost("gone"), part(1))
        await settle()
        assert driver.pool.status().running == 0
        assert driver.reports > reports
        driver.add(other)
        await settle()
        assert other.running == 0
        driver.send(held=False)
        await settle()
        other.end(whole(2))
        assert await task == whole(1, 2)

    clock.run(main())


def test_clocks_are_told_once_that_requests_are_held_and_once_that_they_go_on():
    async def main():
        said: list[bool] = []
        driver = Driver(FakeEngine(), on_held=said.append)
        assert said == []
        for held in (True, True, False, False, True):
            driver.send(held=held)
            assert driver.pool.held == held
        assert said == [True, False, True]

    clock.run(main())
