"""The engine pool: a request survives the loss of engines, and leaves nothing behind however it ends."""

import asyncio

import pytest

from configs.schema import SamplingConfig
from rollout.engine.client import Aborted, EngineError, EngineLost, InvalidRequest
from rollout.engine.pool import EnginePool, NoEngine
from rollout.trajectory import Completion, Finish, Span

SAMPLING = SamplingConfig(max_new_tokens=4)
COMPLETION = Completion((1, 2), (-1.0, -1.0), (Span(0, 0, 2),), Finish.STOP)


class FakeEngine:
    """A client whose requests end when, and how, the test says."""

    def __init__(self, name: str = "engine") -> None:
        self.name = name
        self.requests: list[dict] = []
        self._pending: list[asyncio.Future] = []
        self.aborts = 0

    @property
    def running(self) -> int:
        return sum(not future.done() for future in self._pending)

    async def generate(self, input_ids, sampling, *, greedy=False, cache_key=None) -> Completion:
        self.requests.append({"ids": list(input_ids), "greedy": greedy, "key": cache_key})
        self._pending.append(asyncio.get_running_loop().create_future())
        return await self._pending[-1]

    async def abort_all(self) -> None:
        self.aborts += 1
        if self.name == "refuses":
            raise EngineError("no")

    def end(self, outcome=COMPLETION, n: int = 1) -> None:
        """End the ``n`` oldest running requests."""
        for future in [future for future in self._pending if not future.done()][:n]:
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def make(max_concurrent=10, wait_timeout_s=5.0, isolate_versions=False) -> EnginePool:
    return EnginePool(
        max_concurrent=max_concurrent, wait_timeout_s=wait_timeout_s, isolate_versions=isolate_versions
    )


def start(pool: EnginePool, n: int = 1) -> list[asyncio.Task]:
    return [asyncio.create_task(pool.generate([7], SAMPLING)) for _ in range(n)]


async def assert_nothing_left(pool: EnginePool, engine: FakeEngine, max_concurrent: int) -> None:
    """Every permit is back: as many requests as allowed run at once, and one more waits."""
    before = len(engine.requests)
    tasks = start(pool, max_concurrent + 1)
    await settle()
    assert len(engine.requests) - before == max_concurrent
    engine.end(n=max_concurrent)
    await settle()
    engine.end()
    assert await asyncio.gather(*tasks) == [COMPLETION] * (max_concurrent + 1)
    assert set(pool._load.values()) == {0}


def test_requests_go_to_the_least_loaded_engine():
    async def main():
        pool, engines = make(), [FakeEngine(), FakeEngine(), FakeEngine()]
        for engine in engines:
            await pool.add(engine)
        tasks = start(pool, 6)
        await settle()
        assert [engine.running for engine in engines] == [2, 2, 2]
        engines[1].end(n=2)
        await settle()
        tasks += start(pool, 2)
        await settle()
        assert [engine.running for engine in engines] == [2, 2, 2]
        for engine in engines:
            engine.end(n=2)
        assert await asyncio.gather(*tasks) == [COMPLETION] * 8
        assert pool.tokens_generated == 16
        assert pool.requests_resent == 0

    asyncio.run(main())


def test_no_more_than_the_allowed_requests_run_at_once():
    async def main():
        pool, engine = make(max_concurrent=3), FakeEngine()
        await pool.add(engine)
        tasks = start(pool, 7)
        for done in range(7):
            await settle()
            assert engine.running == min(3, 7 - done)
            engine.end()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_a_lost_engine_is_fenced_off_reported_once_and_its_requests_go_elsewhere():
    async def main():
        pool, bad, good = make(), FakeEngine("bad"), FakeEngine("good")
        await pool.add(bad)
        tasks = start(pool, 3)
        await settle()
        await pool.add(good)
        bad.end(EngineLost("gone"), n=3)
        await settle()
        assert pool.clients == [good]
        assert good.running == 3
        assert pool.lost.get_nowait() is bad
        assert pool.lost.empty(), "three lost requests are one lost engine"
        good.end(n=3)
        assert await asyncio.gather(*tasks) == [COMPLETION] * 3
        assert pool.requests_resent == 3
        await assert_nothing_left(pool, good, 10)

    asyncio.run(main())


def test_a_request_lost_after_its_engine_was_fenced_off_is_not_reported():
    """Whoever fenced it off has decided about it already, and its successor may be starting."""

    async def main():
        pool, engine, other = make(), FakeEngine(), FakeEngine()
        await pool.add(engine)
        (task,) = start(pool)
        await settle()
        await pool.remove(engine)
        await pool.add(other)
        engine.end(EngineLost("closed"))
        await settle()
        assert pool.lost.empty()
        other.end()
        assert await task == COMPLETION

    asyncio.run(main())


def test_a_request_that_ends_after_its_engine_left_does_not_bring_it_back():
    async def main():
        pool, engine = make(), FakeEngine()
        await pool.add(engine)
        (task,) = start(pool)
        await settle()
        await pool.remove(engine)
        engine.end()
        assert await task == COMPLETION
        assert pool.clients == []

    asyncio.run(main())


def test_an_engine_added_twice_keeps_its_load():
    async def main():
        pool, one, other = make(), FakeEngine(), FakeEngine()
        await pool.add(one)
        start(pool, 2)
        await settle()
        await pool.add(other)
        await pool.add(one)
        start(pool, 2)
        await settle()
        assert (one.running, other.running) == (2, 2)

    asyncio.run(main())


def test_an_engine_may_be_removed_twice():
    async def main():
        pool, engine = make(), FakeEngine()
        await pool.add(engine)
        await pool.remove(engine)
        await pool.remove(engine)
        assert pool.clients == []

    asyncio.run(main())


def test_an_aborted_request_is_sent_again():
    async def main():
        pool, engine = make(), FakeEngine()
        await pool.add(engine)
        (task,) = start(pool)
        await settle()
        engine.end(Aborted("stop"))
        await settle()
        assert pool.clients == [engine]
        engine.end()
        assert await task == COMPLETION
        assert pool.requests_resent == 1
        await assert_nothing_left(pool, engine, 10)

    asyncio.run(main())


@pytest.mark.parametrize("error", [EngineError("no"), InvalidRequest("bad"), KeyError("bug")])
def test_a_refused_request_is_the_callers_and_leaves_nothing_behind(error):
    async def main():
        pool, engine = make(max_concurrent=2), FakeEngine()
        await pool.add(engine)
        tasks = start(pool, 2)
        await settle()
        engine.end(error, n=2)
        assert await asyncio.gather(*tasks, return_exceptions=True) == [error, error]
        await assert_nothing_left(pool, engine, 2)

    asyncio.run(main())


def test_requests_wait_for_an_engine():
    async def main():
        pool, engine = make(), FakeEngine()
        tasks = start(pool, 3)
        await settle()
        await pool.add(engine)
        await settle()
        assert engine.running == 3
        engine.end(n=3)
        assert await asyncio.gather(*tasks) == [COMPLETION] * 3

    asyncio.run(main())


def test_no_engine_for_too_long_is_an_error_that_names_the_time_and_leaves_nothing_behind():
    async def main():
        pool, engine = make(max_concurrent=2, wait_timeout_s=0.02), FakeEngine()
        for error in await asyncio.gather(*start(pool, 4), return_exceptions=True):
            assert isinstance(error, NoEngine)
            assert "no engine has served for 0 s" in str(error)
        await pool.add(engine)
        await assert_nothing_left(pool, engine, 2)

    asyncio.run(main())


def test_the_last_engine_lost_means_waiting_for_the_next():
    async def main():
        pool, bad, good = make(), FakeEngine("bad"), FakeEngine("good")
        await pool.add(bad)
        (task,) = start(pool)
        await settle()
        bad.end(EngineLost("gone"))
        await settle()
        assert not task.done()
        await pool.add(good)
        await settle()
        good.end()
        assert await task == COMPLETION

    asyncio.run(main())


@pytest.mark.parametrize("moment", ["in line", "without an engine", "as the engine comes", "generating"])
@pytest.mark.parametrize("steps", range(3))
def test_a_cancelled_request_leaves_nothing_behind(moment, steps):
    async def main():
        pool, engine = make(max_concurrent=1), FakeEngine()
        if moment == "in line":
            await pool.add(engine)
            (first,) = start(pool)
            await settle()
        elif moment == "generating":
            await pool.add(engine)
        (task,) = start(pool)
        await settle()
        if moment == "as the engine comes":
            await pool.add(engine)
            for _ in range(steps):
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if moment == "in line":
            engine.end()
            await first
        await pool.add(engine)
        await assert_nothing_left(pool, engine, 1)

    asyncio.run(main())


@pytest.mark.parametrize("steps", range(3))
def test_a_request_that_is_cancelled_as_its_engine_is_lost_leaves_nothing_behind(steps):
    async def main():
        pool, bad, good = make(max_concurrent=1), FakeEngine("bad"), FakeEngine("good")
        await pool.add(bad)
        (task,) = start(pool)
        await settle()
        bad.end(EngineLost("gone"))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.lost.qsize() == (bad not in pool.clients), "fenced off means reported"
        await pool.remove(bad)
        await pool.add(good)
        await assert_nothing_left(pool, good, 1)

    asyncio.run(main())


@pytest.mark.parametrize(("isolate", "keys"), [(False, [None, None]), (True, ["v0", "v3"])])
def test_with_isolation_requests_of_another_version_share_no_prefix_cache(isolate, keys):
    async def main():
        pool, engine = make(isolate_versions=isolate), FakeEngine()
        await pool.add(engine)
        for version in (0, 3):
            pool.version = version
            (task,) = start(pool)
            await settle()
            engine.end()
            await task
        assert [request["key"] for request in engine.requests] == keys

    asyncio.run(main())


def test_a_resent_request_takes_the_cache_key_of_the_version_it_is_resent_under():
    async def main():
        pool, engine = make(isolate_versions=True), FakeEngine()
        await pool.add(engine)
        (task,) = start(pool)
        await settle()
        pool.version = 1
        engine.end(Aborted("stop"))
        await settle()
        engine.end()
        await task
        assert [request["key"] for request in engine.requests] == ["v0", "v1"]

    asyncio.run(main())


def test_greedy_is_passed_on():
    async def main():
        pool, engine = make(), FakeEngine()
        await pool.add(engine)
        task = asyncio.create_task(pool.generate([7, 8], SAMPLING, greedy=True))
        await settle()
        engine.end()
        await task
        assert engine.requests == [{"ids": [7, 8], "greedy": True, "key": None}]

    asyncio.run(main())


def test_aborting_asks_every_engine_also_when_one_refuses():
    async def main():
        pool, engines = make(), [FakeEngine("refuses"), FakeEngine("agrees")]
        for engine in engines:
            await pool.add(engine)
        await pool.abort_running()
        assert [engine.aborts for engine in engines] == [1, 1]

    asyncio.run(main())
