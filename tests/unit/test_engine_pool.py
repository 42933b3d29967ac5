"""The engine pool: a request survives the loss of engines, and leaves nothing behind however it ends."""

import asyncio
import random
from itertools import pairwise

import pytest

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.client import Aborted, EngineError, EngineLost, InvalidRequest, Silent
from slipstream.rollout.engine.continuation import joined
from slipstream.rollout.engine.pool import SILENCES, EnginePool, NoEngine
from slipstream.rollout.engine.trace import RequestTrace
from slipstream.rollout.trajectory import Completion, Finish, Span
from tests.unit.doubles import Policy

SAMPLING = SamplingConfig(max_new_tokens=4)
COMPLETION = Completion((1, 2), (-1.0, -1.0), (Span(0, 0, 2),), Finish.STOP)


def part(*tokens: int, version: int = 0, finish=Finish.PARTIAL, retractions: int = 0) -> Completion:
    spans = (Span(version, 0, len(tokens)),) if tokens else ()
    return Completion(tokens, tuple(-float(token) for token in tokens), spans, finish, retractions)


def whole(*tokens: int, **more) -> Completion:
    return part(*tokens, **{"finish": Finish.STOP} | more)


class FakeEngine:
    """A client whose requests end when, and how, the test says."""

    def __init__(self, name: str = "engine") -> None:
        self.name = name
        self.requests: list[dict] = []
        self.progress: list = []
        self._pending: list[asyncio.Future] = []
        self.aborts = 0

    @property
    def running(self) -> int:
        return sum(not future.done() for future in self._pending)

    async def generate(
        self, input_ids, sampling, *, greedy=False, cache_key=None, version, progress=None
    ) -> Completion:
        self.requests.append(
            {
                "ids": list(input_ids),
                "budget": sampling.max_new_tokens,
                "greedy": greedy,
                "key": cache_key,
                "version": version,
            }
        )
        self.progress.append(progress)
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
        Policy(),
        max_concurrent=max_concurrent,
        wait_timeout_s=wait_timeout_s,
        isolate_versions=isolate_versions,
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
        assert pool.lost.get_nowait() == (bad, "it does not answer")
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
            pool._policy.version = version
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
        pool._policy.version = 1
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
        assert engine.requests == [{"ids": [7, 8], "budget": 4, "greedy": True, "key": None, "version": 0}]
        assert pool.tokens_generated == 0

    asyncio.run(main())


def test_aborting_asks_every_engine_also_when_one_refuses():
    async def main():
        pool, engines = make(), [FakeEngine("refuses"), FakeEngine("agrees")]
        for engine in engines:
            await pool.add(engine)
        await pool.abort_running()
        assert [engine.aborts for engine in engines] == [1, 1]

    asyncio.run(main())


# ---- continuing


@pytest.mark.parametrize("cut", [EngineLost, Aborted], ids=["lost", "aborted"])
def test_an_interrupted_answer_is_continued_and_not_begun_again(cut):
    async def main():
        pool, first, second = make(), FakeEngine("first"), FakeEngine("second")
        await pool.add(first)
        (task,) = start(pool)
        await settle()
        await pool.remove(first)
        await pool.add(second)
        pool._policy.version = 2
        first.end(cut("gone", part(1, 2, version=0, retractions=1)))
        await settle()
        assert second.requests == [
            {"ids": [7, 1, 2], "budget": 2, "greedy": False, "key": None, "version": 2}
        ]
        second.end(whole(3, version=2, retractions=2))
        assert await task == Completion(
            (1, 2, 3), (-1.0, -2.0, -3.0), (Span(0, 0, 2), Span(2, 2, 3)), Finish.STOP, 3
        )
        assert (pool.tokens_generated, pool.tokens_continued, pool.requests_resent) == (3, 2, 1)

    asyncio.run(main())


def test_an_answer_may_be_interrupted_again_and_again():
    async def main():
        pool, engine = make(), FakeEngine()
        await pool.add(engine)
        task = asyncio.create_task(pool.generate([7], SamplingConfig(max_new_tokens=6)))
        for cut in (part(1, 2), None, part(3), part(4, 5)):
            await settle()
            engine.end(Aborted("stop", cut))
        await settle()
        assert [(request["ids"], request["budget"]) for request in engine.requests] == [
            ([7], 6),
            ([7, 1, 2], 4),
            ([7, 1, 2], 4),
            ([7, 1, 2, 3], 3),
            ([7, 1, 2, 3, 4, 5], 1),
        ]
        engine.end(whole(6, finish=Finish.LENGTH))
        assert await task == whole(1, 2, 3, 4, 5, 6, finish=Finish.LENGTH)
        assert (pool.tokens_generated, pool.tokens_continued, pool.requests_resent) == (6, 5, 4)

    asyncio.run(main())


def test_an_interrupted_answer_that_has_used_its_budget_is_not_asked_for_again():
    async def main():
        pool, engine = make(), FakeEngine()
        await pool.add(engine)
        (task,) = start(pool)
        await settle()
        engine.end(EngineLost("gone", part(1, 2, 3, 4)))
        assert await task == whole(1, 2, 3, 4, finish=Finish.LENGTH)
        assert len(engine.requests) == 1

    asyncio.run(main())


def test_a_prefix_is_continued_and_is_part_of_the_answer_and_of_the_budget():
    async def main():
        pool, engine = make(), FakeEngine()
        await pool.add(engine)
        task = asyncio.create_task(pool.generate([7], SAMPLING, prefix=part(1, version=-3)))
        await settle()
        assert [(request["ids"], request["budget"]) for request in engine.requests] == [([7, 1], 3)]
        engine.end(whole(2))
        assert (await task).spans == (Span(-3, 0, 1), Span(0, 1, 2))
        assert (pool.tokens_generated, pool.tokens_continued, pool.requests_resent) == (1, 1, 0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prefix", "answer"),
    [
        (whole(1), whole(1)),
        (whole(1, finish=Finish.LENGTH), whole(1, finish=Finish.LENGTH)),
        (part(1, 2, 3, 4), whole(1, 2, 3, 4, finish=Finish.LENGTH)),
    ],
    ids=["stopped", "at its length", "budget used"],
)
def test_a_prefix_that_has_ended_is_the_answer_without_asking_anyone(prefix, answer):
    async def main():
        assert await make().generate([7], SAMPLING, prefix=prefix) == answer

    asyncio.run(main())


def test_progress_is_told_the_whole_answer_so_far():
    async def main():
        pool, engine, seen = make(), FakeEngine(), []
        await pool.add(engine)
        sampling = SamplingConfig(max_new_tokens=9)
        task = asyncio.create_task(pool.generate([7], sampling, prefix=part(1), progress=seen.append))
        await settle()
        engine.progress[0](part(2))
        engine.end(Aborted("stop", part(2, 3, version=1)))
        await settle()
        engine.progress[1](part(4, version=1))
        engine.end(whole(4, 5, version=2))
        answer = await task
        assert [one.tokens for one in seen] == [(1, 2), (1, 2, 3), (1, 2, 3, 4)]
        assert [one.finish for one in seen] == [Finish.PARTIAL] * 3
        assert seen[-1].spans == (Span(0, 0, 1), Span(1, 1, 4))
        assert answer.tokens == (1, 2, 3, 4, 5)
        assert answer.spans == (Span(0, 0, 1), Span(1, 1, 3), Span(2, 3, 5))

    asyncio.run(main())


def test_silence_is_not_held_against_an_engine_that_is_well():
    async def main():
        pool, engine = make(), FakeEngine()
        await pool.add(engine)
        (task,) = start(pool)
        await settle()
        engine.end(Silent("nothing came", part(1)))
        await settle()
        assert pool.clients == [engine]
        assert pool.lost.empty()
        engine.end(whole(2))
        assert await task == whole(1, 2)

    asyncio.run(main())


def test_a_request_that_is_met_with_silence_again_and_again_fails():
    async def main():
        pool, engine = make(max_concurrent=1), FakeEngine()
        await pool.add(engine)
        (task,) = start(pool)
        for _ in range(SILENCES):
            await settle()
            engine.end(Silent("nothing came for 600 s"))
        with pytest.raises(EngineError, match=f"after {SILENCES} times: nothing came .*request_timeout_s"):
            await task
        assert pool.clients == [engine]
        await assert_nothing_left(pool, engine, 1)

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(20))
def test_however_often_answers_are_cut_the_engines_generate_every_token_once(seed):
    """Engines that continue a counting sequence, and are cut off at random."""
    chance = random.Random(seed)

    class Counting(FakeEngine):
        async def generate(self, input_ids, sampling, *, greedy, cache_key, version, progress) -> Completion:
            await asyncio.sleep(0)
            first, budget = input_ids[-1] + 1, sampling.max_new_tokens
            n = min(budget, 20 - first + 1)
            if chance.random() < 0.6:
                cut = part(*range(first, first + chance.randint(0, n - 1)), version=version)
                raise Aborted("stop", cut if cut.tokens else None)
            finish = Finish.STOP if first + n - 1 == 20 else Finish.LENGTH
            return whole(*range(first, first + n), version=version, finish=finish)

    async def main():
        pool = make()
        await pool.add(Counting())
        for budget in (1, 7, 20, 30):
            answer = await pool.generate([0], SamplingConfig(max_new_tokens=budget))
            assert answer.tokens == tuple(range(1, min(budget, 20) + 1))
            assert answer.logprobs == tuple(-float(token) for token in answer.tokens)
            assert answer.finish is (Finish.STOP if budget >= 20 else Finish.LENGTH)
        assert pool.tokens_generated == 1 + 7 + 20 + 20

    asyncio.run(main())


# ---- the limit, and holding requests back


def test_the_limit_may_change_while_requests_run():
    async def main():
        pool, engine = make(max_concurrent=4), FakeEngine()
        await pool.add(engine)
        tasks = start(pool, 6)
        await settle()
        pool.limit = 2
        assert (engine.running, pool.in_use, pool.limit) == (4, 4, 2)
        engine.end(n=2)
        await settle()
        assert engine.running == 2
        pool.limit = 3
        await settle()
        assert engine.running == 3
        for _ in range(2):
            engine.end(n=3)
            await settle()
        assert await asyncio.gather(*tasks) == [COMPLETION] * 6

    asyncio.run(main())


def test_draining_waits_for_running_requests_while_new_ones_wait():
    async def main():
        pool, engines = make(wait_timeout_s=0.02), [FakeEngine(), FakeEngine()]
        for engine in engines:
            await pool.add(engine)
        old = start(pool, 2)
        await settle()
        drained = pool.drained(timeout_s=5)
        entering = asyncio.create_task(drained.__aenter__())
        await settle()
        new = start(pool, 4)
        engines[0].end()
        await settle()
        assert not entering.done(), "the other engine is not idle yet"
        engines[1].end()
        await entering
        assert await asyncio.gather(*old) == [COMPLETION] * 2
        await asyncio.sleep(0.05)
        assert [engine.running for engine in engines] == [0, 0]
        assert not any(task.done() for task in new), "longer than requests wait for an engine"
        await drained.__aexit__(None, None, None)
        await settle()
        assert [engine.running for engine in engines] == [2, 2]
        for engine in engines:
            engine.end(n=2)
        assert await asyncio.gather(*new) == [COMPLETION] * 4

    asyncio.run(main())


def test_draining_continues_after_the_update_what_was_interrupted_during_it():
    async def main():
        pool, engine = make(), FakeEngine()
        await pool.add(engine)
        (task,) = start(pool)
        await settle()
        async with asyncio.timeout(1):
            drained = pool.drained(timeout_s=5)
            entering = asyncio.create_task(drained.__aenter__())
            await settle()
            engine.end(EngineLost("gone", part(1)))
            await entering
            await pool.add(engine)
            await settle()
            assert engine.running == 0
            await drained.__aexit__(None, None, None)
            await settle()
            engine.end(whole(2))
            assert await task == whole(1, 2)

    asyncio.run(main())


def test_draining_goes_on_without_requests_that_take_too_long(caplog):
    async def main():
        pool, engine = make(), FakeEngine()
        await pool.add(engine)
        (task,) = start(pool)
        await settle()
        async with pool.drained(timeout_s=0.02):
            assert engine.running == 1
        assert "1 requests outlast 0 s of draining" in caplog.text
        engine.end()
        assert await task == COMPLETION

    asyncio.run(main())


def test_draining_an_idle_pool_takes_no_time_and_an_error_ends_it():
    async def main():
        pool, engine = make(), FakeEngine()
        await pool.add(engine)

        async def fail() -> None:
            async with asyncio.timeout(1), pool.drained(timeout_s=5):
                raise KeyError

        with pytest.raises(KeyError):
            await fail()
        async with asyncio.timeout(1), pool.drained(timeout_s=5):
            pass
        await assert_nothing_left(pool, engine, 10)

    asyncio.run(main())


# ---- traces


def traced() -> tuple[EnginePool, list[RequestTrace]]:
    seen: list[RequestTrace] = []
    return (
        EnginePool(Policy(), max_concurrent=4, wait_timeout_s=5, isolate_versions=False, trace=seen.append),
        seen,
    )


def test_every_engine_request_is_traced_once():
    async def main():
        pool, seen = traced()
        engine = FakeEngine()
        await pool.add(engine)
        (task,) = start(pool)
        await settle()
        engine.progress[0](part(1))
        await asyncio.sleep(0.01)
        engine.end(Aborted("stop", part(1, 2, retractions=1)))
        await settle()
        engine.end(whole(3))
        await task
        first, second = seen
        assert (first.engine, first.prompt_tokens, first.new_tokens) == ("engine", 1, 2)
        assert (first.retractions, first.interrupted) == (1, True)
        assert first.start_s <= first.first_token_s < first.end_s - 0.005
        assert (second.prompt_tokens, second.new_tokens, second.interrupted) == (3, 1, False)
        times = [first.start_s, first.end_s, second.start_s, second.first_token_s, second.end_s]
        assert all(a <= b for a, b in pairwise(times))

    asyncio.run(main())


@pytest.mark.parametrize("end", ["refused", "lost", "cancelled"])
def test_a_request_without_an_answer_is_traced_as_interrupted(end):
    async def main():
        pool, seen = traced()
        engine = FakeEngine()
        await pool.add(engine)
        (task,) = start(pool)
        await settle()
        if end == "cancelled":
            engine.progress[0](part(1))
        else:
            engine.end(EngineError("no") if end == "refused" else EngineLost("gone"))
            await settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (trace,) = seen
        assert trace.interrupted
        assert trace.new_tokens == (1 if end == "cancelled" else 0)
        assert (trace.first_token_s is None) == (end != "cancelled")

    asyncio.run(main())


# ---- weights in doubt


def mixed(*versions: int, finish=Finish.STOP) -> Completion:
    """Token k is k + 1, of the k-th of ``versions``."""
    tokens = tuple(range(1, len(versions) + 1))
    spans = tuple(Span(version, k, k + 1) for k, version in enumerate(versions))
    return Completion(tokens, tuple(-float(token) for token in tokens), joined(spans), finish)


def test_an_answer_with_tokens_of_a_version_in_doubt_waits_for_the_verdict():
    async def main():
        pool, engine = make(), FakeEngine()
        await pool.add(engine)
        [task] = start(pool)
        await settle()
        pool.doubt(5)
        engine.end(mixed(4, 5))
        await settle()
        assert not task.done()
        pool.trust(engine)
        assert await task == mixed(4, 5)

    asyncio.run(main())


def test_an_answer_of_older_versions_waits_for_nothing():
    async def main():
        pool, engine = make(), FakeEngine()
        await pool.add(engine)
        [task] = start(pool)
        await settle()
        pool.doubt(5)
        engine.end(mixed(3, 4))
        assert await task == mixed(3, 4)

    asyncio.run(main())


def test_what_a_condemned_engine_sampled_from_the_version_in_doubt_is_sampled_again_elsewhere():
    async def main():
        pool, bad, good = make(), FakeEngine("bad"), FakeEngine("good")
        await pool.add(bad)
        [task] = start(pool)
        await settle()
        await pool.add(good)
        pool.doubt(5)
        bad.end(mixed(4, 4, 5))
        await settle()
        pool.trust(good)
        await pool.condemn(bad, "wrong weights")
        await settle()
        assert pool.lost.get_nowait() == (bad, "wrong weights")
        assert pool.lost.empty()
        assert good.requests[0]["ids"] == [7, 1, 2], "the two tokens of version 4 are kept"
        assert good.requests[0]["budget"] == 2
        good.end(whole(9, version=5))
        answer = await task
        assert answer.tokens == (1, 2, 9)
        assert [span.version for span in answer.spans] == [4, 5]
        assert pool.tokens_generated == 3

    asyncio.run(main())


def test_a_request_that_was_only_sampled_in_doubt_begins_again():
    async def main():
        pool, bad, good = make(), FakeEngine("bad"), FakeEngine("good")
        await pool.add(bad)
        pool.doubt(5)
        [task] = start(pool)
        await settle()
        bad.end(mixed(5, 5))
        await settle()
        await pool.condemn(bad, "wrong weights")
        await pool.add(good)
        await settle()
        assert good.requests[0]["ids"] == [7]
        good.end(whole(3, version=5))
        assert (await task).tokens == (3,)

    asyncio.run(main())


def test_progress_in_doubt_is_told_to_nobody_and_goes_on_with_the_next_after_the_verdict():
    async def main():
        pool, engine, told = make(), FakeEngine(), []
        await pool.add(engine)
        task = asyncio.create_task(pool.generate([7], SAMPLING, progress=told.append))
        await settle()
        engine.progress[0](part(1, version=4))
        pool.doubt(5)
        engine.progress[0](part(1, 2, version=4))  # perhaps newer than it says
        assert [len(so_far.tokens) for so_far in told] == [1]
        pool.trust(engine)
        engine.progress[0](part(1, 2, 3, version=4))
        assert [len(so_far.tokens) for so_far in told] == [1, 3]
        engine.end(mixed(4, 5, 5))
        await task

    asyncio.run(main())


@pytest.mark.parametrize("cut", [EngineLost, Silent])
def test_of_an_engine_lost_in_doubt_only_what_had_come_before_is_kept(cut):
    async def main():
        pool, bad, good = make(), FakeEngine("bad"), FakeEngine("good")
        await pool.add(bad)
        told = []
        task = asyncio.create_task(pool.generate([7], SAMPLING, progress=told.append))
        await settle()
        bad.progress[0](part(1, version=4))
        pool.doubt(5)
        bad.progress[0](part(1, 2, version=4))
        await pool.add(good)
        bad.end(cut("x", part(1, 2, 3, version=4)))
        await settle()
        assert [request["ids"] for request in bad.requests[1:] + good.requests] == [[7, 1]]
        (bad if cut is Silent else good).end(whole(9, version=4))
        assert (await task).tokens == (1, 9)

    asyncio.run(main())


def test_an_answer_aborted_in_doubt_keeps_its_tokens_of_older_versions():
    async def main():
        pool, engine = make(), FakeEngine()
        await pool.add(engine)
        [task] = start(pool)
        await settle()
        pool.doubt(5)
        engine.end(Aborted("paused", mixed(4, 4, 5, finish=Finish.PARTIAL)))
        await settle()
        assert engine.requests[1]["ids"] == [7, 1, 2]
        pool.trust(engine)
        engine.end(whole(9, version=5))
        assert (await task).tokens == (1, 2, 9)

    asyncio.run(main())


def test_an_answer_of_an_engine_that_was_fenced_off_without_a_verdict_is_not_believed():
    """It missed a version: what it says of its tokens may be as wrong as its weights."""

    async def main():
        pool, bad, good = make(), FakeEngine("bad"), FakeEngine("good")
        await pool.add(bad)
        [task] = start(pool)
        await settle()
        pool.doubt(5)
        await pool.remove(bad)
        await pool.add(good)
        bad.end(mixed(4, 5))
        await settle()
        assert good.requests[0]["ids"] == [7, 1]
        good.end(whole(9, version=5))
        await task

    asyncio.run(main())


def test_without_a_verdict_in_time_the_engine_is_given_up():
    async def main():
        pool, bad, good = make(wait_timeout_s=0.1), FakeEngine("bad"), FakeEngine("good")
        await pool.add(bad)
        [task] = start(pool)
        await settle()
        pool.doubt(5)
        bad.end(mixed(5))
        await pool.add(good)
        await asyncio.sleep(0.2)
        assert pool.lost.get_nowait() == (bad, "no verdict on its weights in 0.1 s")
        good.end(whole(9, version=5))
        assert (await task).tokens == (9,)

    asyncio.run(main())


def test_an_engine_is_condemned_once():
    async def main():
        pool, engine = make(), FakeEngine()
        await pool.add(engine)
        await pool.condemn(engine, "first")
        await pool.condemn(engine, "second")
        assert pool.clients == []
        assert pool.lost.qsize() == 1

    asyncio.run(main())
