"""Requests are prepared in threads: one of a key at a time, and the event loop goes on."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from slipstream.rollout.gateway.serving.limits import Refusal
from slipstream.rollout.gateway.serving.workers import MOST_WAITING, THREADS, KeyTurn, Workers
from tests.unit.driven_pool import settle

T = TypeVar("T")


class Work:
    """Work that takes until the test says."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.may_end.wait(60)
        return "done"


async def prepared(workers: Workers, key: str, work: Callable[[], T], size: int) -> T:
    turn = workers.turn(key)
    await turn.taken(size)
    return await turn.run(work)


async def taken(workers: Workers, key: str) -> KeyTurn:
    turn = workers.turn(key)
    await turn.taken(1)
    return turn


def test_one_request_of_a_key_is_prepared_at_a_time_and_those_of_others_beside_it():
    async def main():
        workers, works = Workers(), [Work() for _ in range(3)]
        tasks = [
            asyncio.create_task(prepared(workers, key, work, 0))
            for key, work in zip(("anna", "anna", "bert"), works, strict=True)
        ]
        assert await asyncio.to_thread(works[0].begun.wait, 10)
        assert await asyncio.to_thread(works[2].begun.wait, 10)
        assert not works[1].begun.is_set()
        for work in works:
            work.may_end.set()
        assert await asyncio.gather(*tasks) == ["done"] * 3
        workers.close()

    asyncio.run(main())


def test_a_request_that_is_cancelled_keeps_the_turn_of_its_key_until_its_work_has_ended():
    async def main():
        workers, first, second = Workers(), Work(), Work()
        gone = asyncio.create_task(prepared(workers, "anna", first, 0))
        assert await asyncio.to_thread(first.begun.wait, 10)
        gone.cancel()
        waiting = asyncio.create_task(prepared(workers, "anna", second, 0))
        await settle()
        assert gone.cancelled() and not second.begun.is_set()
        second.may_end.set()
        first.may_end.set()
        assert await waiting == "done"
        workers.close()

    asyncio.run(main())


def test_no_more_requests_of_a_key_wait_than_memory_is_meant_for():
    async def main():
        workers, work = Workers(), Work()
        size = MOST_WAITING // 4
        tasks = [asyncio.create_task(prepared(workers, "anna", work, size)) for _ in range(5)]
        await settle()
        with pytest.raises(Refusal) as refused:
            await prepared(workers, "anna", work, 1)
        assert (refused.value.status, refused.value.retry_after_s) == (429, 1.0)
        work.may_end.set()
        assert await prepared(workers, "bert", work, size) == "done"
        assert await asyncio.gather(*tasks) == ["done"] * len(tasks)
        workers.close()

    asyncio.run(main())


def test_an_error_of_the_work_is_the_callers_and_ends_its_turn():
    async def main():
        workers = Workers()
        for _ in range(THREADS + 1):
            with pytest.raises(ZeroDivisionError):
                await prepared(workers, "anna", lambda: 1 // 0, 0)
        workers.close()

    asyncio.run(main())


def test_the_next_request_of_a_key_is_not_read_before_this_one_is_prepared_or_refused():
    async def main():
        workers, work = Workers(), Work()
        read = await taken(workers, "anna")
        other = asyncio.create_task(taken(workers, "anna"))
        await settle()
        assert not other.done()
        preparing = asyncio.create_task(read.run(work))
        await settle()
        read.give_up()  # its client is gone; the work goes on
        await settle()
        assert not other.done()
        work.may_end.set()
        assert await preparing == "done"
        read.give_up()
        refused, last = await other, asyncio.create_task(taken(workers, "anna"))
        await settle()
        assert not last.done()
        refused.give_up()
        (await last).give_up()
        workers.close()

    asyncio.run(main())
