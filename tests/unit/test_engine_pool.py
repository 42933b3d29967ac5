"""The engine pool: a request survives the loss of engines, and leaves nothing behind however it ends."""

import asyncio
import random
from itertools import pairwise

import pytest

from slipstream.backend.simulate import clock
from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.client import (
    Aborted,
    EngineError,
    EngineLost,
    InvalidRequest,
    RequestRefused,
    Silent,
)
from slipstream.rollout.engine.engine_pool import MOST_LOSSES, SILENCES, NoEngine
from slipstream.rollout.engine.request_trace import RequestTrace
from slipstream.rollout.engine.routing import LostEngine, Suspect
from slipstream.rollout.engine.sampling import LiveSampling
from slipstream.rollout.tokens.trajectory import Completion, Finish, Span
from tests.unit.driven_pool import (
    COMPLETION,
    Driver,
    FakeEngine,
    arrive,
    asked,
    assert_nothing_left,
    part,
    settle,
    start,
    watched,
    whole,
)


def test_requests_go_to_the_least_loaded_engine():
    async def main():
        engines = [FakeEngine("a"), FakeEngine("b"), FakeEngine("c")]
        driver = Driver(*engines)
        tasks = start(driver, 6)
        await settle()
        assert [engine.running for engine in engines] == [2, 2, 2]
        engines[1].end(n=2)
        await settle()
        tasks += start(driver, 2)
        await settle()
        assert [engine.running for engine in engines] == [2, 2, 2]
        assert driver.pool.status().running == 6
        for engine in engines:
            engine.end(n=2)
        assert await asyncio.gather(*tasks) == [COMPLETION] * 8
        status = driver.pool.status()
        assert (status.tokens_generated, status.requests_resent, status.running) == (16, 0, 0)

    clock.run(main())


def test_equally_loaded_engines_are_preferred_in_the_order_of_the_record():
    """The driver turns the order for each collector, so that not all of them begin with the same engine."""

    async def main():
        engines = [FakeEngine("a"), FakeEngine("b")]
        driver = Driver(*engines)
        start(driver)
        await settle()
        driver._serving = dict(reversed(driver._serving.items()))
        engines[0].end()
        await settle()
        driver.send()
        start(driver)
        await settle()
        assert [len(engine.requests) for engine in engines] == [1, 1]

    clock.run(main())


def test_no_more_than_the_allowed_requests_run_at_once():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine, max_concurrent=3)
        tasks = start(driver, 7)
        for done in range(7):
            await settle()
            assert engine.running == min(3, 7 - done)
            engine.end()
        await asyncio.gather(*tasks)

    clock.run(main())


def test_a_lost_engine_is_out_of_use_reported_once_and_its_requests_go_elsewhere():
    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        driver = Driver(bad)
        tasks = start(driver, 3)
        await settle()
        driver.add(good)
        reports = driver.reports
        bad.end(EngineLost("gone"), n=3)
        await settle()
        assert good.running == 3
        assert driver.pool.status().lost == (LostEngine("bad", 1, "it does not answer"),)
        assert driver.reports == reports + 1, "three lost requests are one lost engine"
        good.end(n=3)
        assert await asyncio.gather(*tasks) == [COMPLETION] * 3
        assert driver.pool.requests_resent == 3
        await assert_nothing_left(driver, good, 10)

    clock.run(main())


def test_a_loss_is_repeated_until_a_record_shows_that_the_driver_knows():
    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        driver = Driver(bad, good)
        start(driver)
        await settle()
        bad.end(EngineLost("gone"))
        await settle()
        driver.send()
        assert driver.lost == [("bad", "it does not answer")]
        start(driver, 3)
        await settle()
        assert (bad.running, good.running) == (0, 4), "a record that still has it does not bring it back"
        driver.remove(bad)
        assert driver.lost == []

    clock.run(main())


def test_a_request_lost_after_its_engine_was_given_up_is_not_reported():
    """The driver has decided about it already, and its successor may be starting."""

    async def main():
        engine, other = FakeEngine("engine"), FakeEngine("other")
        driver = Driver(engine)
        engine.ignores_close = True
        (task,) = start(driver)
        await settle()
        driver.remove(engine)
        driver.add(other)
        engine.end(EngineLost("closed"))
        await settle()
        assert driver.lost == []
        other.end()
        assert await task == COMPLETION

    clock.run(main())


def test_a_request_that_ends_after_its_engine_left_does_not_bring_it_back():
    async def main():
        engine = FakeEngine()
        engine.ignores_close = True
        driver = Driver(engine)
        (task,) = start(driver)
        await settle()
        driver.remove(engine)
        engine.end()
        assert await task == COMPLETION
        start(driver)
        await settle()
        assert len(engine.requests) == 1
        assert driver.pool.status().running == 0

    clock.run(main())


def test_an_aborted_request_is_sent_again():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        (task,) = start(driver)
        await settle()
        engine.end(Aborted("stop"))
        await settle()
        assert driver.lost == []
        engine.end()
        assert await task == COMPLETION
        assert driver.pool.requests_resent == 1
        await assert_nothing_left(driver, engine, 10)

    clock.run(main())


@pytest.mark.parametrize("error", [EngineError("no"), InvalidRequest("bad"), KeyError("bug")])
def test_a_refused_request_is_the_callers_and_leaves_nothing_behind(error):
    async def main():
        engine = FakeEngine()
        driver = Driver(engine, max_concurrent=2)
        tasks = start(driver, 2)
        await settle()
        engine.end(error, n=2)
        assert await asyncio.gather(*tasks, return_exceptions=True) == [error, error]
        assert driver.lost == []
        await assert_nothing_left(driver, engine, 2)

    clock.run(main())


def test_requests_wait_for_an_engine():
    async def main():
        driver, engine = Driver(), FakeEngine()
        driver.send()
        tasks = start(driver, 3)
        await settle()
        driver.add(engine)
        await settle()
        assert engine.running == 3
        engine.end(n=3)
        assert await asyncio.gather(*tasks) == [COMPLETION] * 3

    clock.run(main())


def test_no_engine_for_too_long_is_an_error_that_names_the_time_and_leaves_nothing_behind():
    async def main():
        driver, engine = Driver(max_concurrent=2, wait_timeout_s=0.02), FakeEngine()
        driver.send()
        for error in await asyncio.gather(*start(driver, 4), return_exceptions=True):
            assert isinstance(error, NoEngine)
            assert "no engine has served for 0 s" in str(error)
        driver.add(engine)
        await assert_nothing_left(driver, engine, 2)

    clock.run(main())


def test_the_last_engine_lost_means_waiting_for_the_next():
    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        driver = Driver(bad)
        (task,) = start(driver)
        await settle()
        bad.end(EngineLost("gone"))
        await settle()
        assert not task.done()
        driver.add(good)
        await settle()
        good.end()
        assert await task == COMPLETION

    clock.run(main())


@pytest.mark.parametrize("moment", ["in line", "without an engine", "as the engine comes", "generating"])
@pytest.mark.parametrize("steps", range(3))
def test_a_cancelled_request_leaves_nothing_behind(moment, steps):
    async def main():
        engine = FakeEngine()
        driver = Driver(*([engine] if moment in ("in line", "generating") else []), max_concurrent=1)
        if moment == "in line":
            (first,) = start(driver)
            await settle()
        (task,) = start(driver)
        await settle()
        if moment == "as the engine comes":
            driver.add(engine)
            for _ in range(steps):
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if moment == "in line":
            engine.end()
            await first
        if moment == "without an engine":
            driver.add(engine)
        await assert_nothing_left(driver, engine, 1)

    clock.run(main())


@pytest.mark.parametrize("steps", range(3))
def test_a_request_that_is_cancelled_as_its_engine_is_lost_leaves_nothing_behind(steps):
    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        driver = Driver(bad, max_concurrent=1)
        (task,) = start(driver)
        await settle()
        bad.end(EngineLost("gone"))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        driver.remove(bad)
        driver.add(good)
        await assert_nothing_left(driver, good, 1)

    clock.run(main())


@pytest.mark.parametrize(("isolate", "keys"), [(False, [None, None]), (True, ["v0", "v3"])])
def test_with_isolation_requests_of_another_version_share_no_prefix_cache(isolate, keys):
    async def main():
        engine = FakeEngine()
        driver = Driver(engine, isolate_versions=isolate)
        for version in (0, 3):
            driver.send(version=version)
            (task,) = start(driver)
            await settle()
            engine.end()
            await task
        assert [asked["key"] for asked in engine.asked] == keys

    clock.run(main())


def test_a_resent_request_takes_the_cache_key_of_the_version_it_is_resent_under():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine, isolate_versions=True)
        (task,) = start(driver)
        await settle()
        driver.send(version=1)
        engine.end(Aborted("stop"))
        await settle()
        engine.end()
        await task
        assert [asked["key"] for asked in engine.asked] == ["v0", "v1"]

    clock.run(main())


def test_greedy_is_passed_on():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        (task,) = start(driver, greedy=True)
        await settle()
        engine.end()
        await task
        assert engine.asked == [asked([7], 4, greedy=True)]
        assert driver.pool.tokens_generated == 0

    clock.run(main())


# ---- continuing


@pytest.mark.parametrize("cut", [EngineLost, Aborted], ids=["lost", "aborted"])
def test_an_interrupted_completion_is_continued_and_not_begun_again(cut):
    async def main():
        first, second = FakeEngine("first"), FakeEngine("second")
        driver = Driver(first)
        (task,) = start(driver)
        await settle()
        first.ignores_close = True
        driver.remove(first)
        driver.add(second)
        driver.send(version=2)
        first.end(cut("gone"), part(1, 2, version=0, retractions=1))
        await settle()
        assert second.asked == [asked([7, 1, 2], 2, version=2)]
        second.end(whole(3, version=2, retractions=2))
        assert await task == Completion(
            (1, 2, 3), (-1.0, -2.0, -3.0), (Span(0, 0, 2), Span(2, 2, 3)), Finish.STOP, 3
        )
        pool = driver.pool
        assert (pool.tokens_generated, pool.tokens_continued, pool.requests_resent) == (3, 2, 1)

    clock.run(main())


def test_a_completion_may_be_interrupted_again_and_again():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        (task,) = start(driver, sampling=SamplingConfig(max_new_tokens=6))
        for reply in (part(1, 2), None, part(3), part(4, 5)):
            await settle()
            engine.end(Aborted("stop"), reply)
        await settle()
        assert [(asked["ids"], asked["budget"]) for asked in engine.asked] == [
            ([7], 6),
            ([7, 1, 2], 4),
            ([7, 1, 2], 4),
            ([7, 1, 2, 3], 3),
            ([7, 1, 2, 3, 4, 5], 1),
        ]
        engine.end(whole(6, finish=Finish.LENGTH))
        assert await task == whole(1, 2, 3, 4, 5, 6, finish=Finish.LENGTH)
        pool = driver.pool
        assert (pool.tokens_generated, pool.tokens_continued, pool.requests_resent) == (6, 5, 4)

    clock.run(main())


def test_an_interrupted_completion_that_has_used_its_budget_is_not_asked_for_again():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        (task,) = start(driver)
        await settle()
        engine.end(EngineLost("gone"), part(1, 2, 3, 4))
        assert await task == whole(1, 2, 3, 4, finish=Finish.LENGTH)
        assert len(engine.requests) == 1

    clock.run(main())


def test_a_prefix_is_continued_and_is_part_of_the_completion_and_of_the_budget():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        (task,) = start(driver, prefix=part(1, version=-3))
        await settle()
        assert engine.asked == [asked([7, 1], 3)]
        engine.end(whole(2))
        assert (await task).spans == (Span(-3, 0, 1), Span(0, 1, 2))
        pool = driver.pool
        assert (pool.tokens_generated, pool.tokens_continued, pool.requests_resent) == (1, 1, 0)

    clock.run(main())


@pytest.mark.parametrize(
    ("prefix", "completion"),
    [
        (whole(1), whole(1)),
        (whole(1, finish=Finish.LENGTH), whole(1, finish=Finish.LENGTH)),
        (part(1, 2, 3, 4), whole(1, 2, 3, 4, finish=Finish.LENGTH)),
    ],
    ids=["stopped", "at its length", "budget used"],
)
def test_a_prefix_that_has_ended_is_the_completion_without_asking_anyone(prefix, completion):
    async def main():
        (task,) = start(Driver(), prefix=prefix)
        assert await task == completion

    clock.run(main())


def test_the_caller_is_told_of_all_that_there_is_so_far():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        task, seen = watched(driver, prefix=part(1), sampling=SamplingConfig(max_new_tokens=9))
        await settle()
        engine.grow(part(2))
        engine.end(Aborted("stop"), part(2, 3, version=1))
        await settle()
        engine.grow(part(4, version=1))
        engine.end(whole(4, 5, version=2))
        completion = await task
        assert [so_far.tokens for so_far in seen] == [(1, 2), (1, 2, 3), (1, 2, 3, 4)]
        assert [so_far.finish for so_far in seen] == [Finish.PARTIAL] * 3
        assert seen[-1].spans == (Span(0, 0, 1), Span(1, 1, 4))
        assert completion.tokens == (1, 2, 3, 4, 5)
        assert completion.spans == (Span(0, 0, 1), Span(1, 1, 3), Span(2, 3, 5))

    clock.run(main())


def test_silence_is_not_held_against_an_engine_that_is_well():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        (task,) = start(driver)
        await settle()
        engine.end(Silent("nothing came"), part(1))
        await settle()
        assert driver.lost == []
        engine.end(whole(2))
        assert await task == whole(1, 2)

    clock.run(main())


def test_a_request_that_is_met_with_silence_again_and_again_fails():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine, max_concurrent=1)
        (task,) = start(driver)
        for _ in range(SILENCES):
            await settle()
            engine.end(Silent("nothing came for 600 s"))
        with pytest.raises(EngineError, match=f"after {SILENCES} times: nothing came .*request_timeout_s"):
            await task
        assert driver.lost == []
        await assert_nothing_left(driver, engine, 1)

    clock.run(main())


@pytest.mark.parametrize("seed", range(20))
def test_however_often_completions_are_cut_the_engines_generate_every_token_once(seed):
    """Engines that continue a counting sequence, and are cut off at random."""
    chance = random.Random(seed)

    class Counting(FakeEngine):
        async def generate(
            self, input_ids, sampling, completion, *, greedy, cache_key, version, grown
        ) -> None:
            await asyncio.sleep(0)
            first, budget = len(completion.tokens) + 1, completion.tokens_left(sampling.max_new_tokens)
            n = min(budget, 20 - first + 1)
            if chance.random() < 0.6:
                arrive(completion, part(*range(first, first + chance.randint(0, n - 1)), version=version))
                raise Aborted("stop")
            finish = Finish.STOP if first + n - 1 == 20 else Finish.LENGTH
            arrive(completion, whole(*range(first, first + n), version=version, finish=finish))

    async def main():
        driver = Driver(Counting())
        for budget in (1, 7, 20, 30):
            (task,) = start(driver, sampling=SamplingConfig(max_new_tokens=budget))
            completion = await task
            assert completion.tokens == tuple(range(1, min(budget, 20) + 1))
            assert completion.logprobs == tuple(-float(token) for token in completion.tokens)
            assert completion.finish is (Finish.STOP if budget >= 20 else Finish.LENGTH)
        assert driver.pool.tokens_generated == 1 + 7 + 20 + 20

    clock.run(main())


# ---- traces


def test_every_engine_request_is_traced_once():
    async def main():
        seen: list[RequestTrace] = []
        engine = FakeEngine()
        driver = Driver(engine, trace=seen.append)
        (task,) = start(driver)
        await settle()
        engine.grow(part(1))
        await asyncio.sleep(0.01)
        engine.end(Aborted("stop"), part(1, 2, retractions=1))
        await settle()
        engine.end(whole(3))
        await task
        first, second = seen
        assert (first.engine, first.prompt_tokens, first.new_tokens) == ("engine", 1, 2)
        assert (first.retractions, first.interrupted) == (1, True)
        assert first.start_s <= first.first_token_s < first.end_s - 0.005
        assert (second.prompt_tokens, second.new_tokens, second.interrupted) == (3, 1, False)
        assert second.retractions == 0
        times = [first.start_s, first.end_s, second.start_s, second.first_token_s, second.end_s]
        assert all(a <= b for a, b in pairwise(times))

    asyncio.run(main())


@pytest.mark.parametrize("end", ["refused", "lost", "cancelled"])
def test_a_request_without_a_completion_is_traced_as_interrupted(end):
    async def main():
        seen: list[RequestTrace] = []
        engine = FakeEngine()
        driver = Driver(engine, trace=seen.append)
        (task,) = start(driver)
        await settle()
        if end == "cancelled":
            engine.grow(part(1))
        else:
            engine.end(EngineError("no") if end == "refused" else EngineLost("gone"))
            await settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (trace,) = seen
        assert trace.interrupted
        assert trace.new_tokens == (1 if end == "cancelled" else 0)
        assert (trace.first_token_s is None) == (end != "cancelled")

    clock.run(main())


# ---- requests of clients under which engines are lost

BY_ANNA = LiveSampling(4, {}, 100, request="request 5 of the key anna")


def test_a_request_that_costs_a_second_engine_is_given_up():
    async def main():
        engines = [FakeEngine(name) for name in "abc"]
        driver = Driver(engines[0])
        (task,) = start(driver, sampling=BY_ANNA)
        await settle()
        driver.add(engines[1])
        engines[0].end(EngineLost("gone"))
        await settle()
        driver.add(engines[2])
        engines[1].end(EngineLost("gone, too"))
        with pytest.raises(RequestRefused, match="a and b were lost while they ran this request: gone, too"):
            await task
        assert engines[2].requests == []
        suspects = [Suspect(name, life, BY_ANNA.request) for name, life in (("a", 1), ("b", 2))]
        assert list(driver.pool.status().suspects) == suspects
        await assert_nothing_left(driver, engines[2], 10)

    clock.run(main())


def test_requests_of_a_lost_engine_are_tried_one_at_a_time_until_a_token_comes():
    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        driver = Driver(bad)
        tasks = start(driver, 3, sampling=BY_ANNA)
        await settle()
        driver.add(good)
        bad.end(EngineLost("gone"), n=3)
        await settle()
        assert good.running == 1
        tasks += start(driver, sampling=BY_ANNA)
        await settle()
        assert good.running == 2, "others are not held up"
        good.grow(part(1))
        await settle()
        assert good.running == 3
        good.end(n=3)
        await settle()
        assert good.running == 1, "one that has ended has been tried"
        good.end()
        assert await asyncio.gather(*tasks) == [COMPLETION] * 4
        await assert_nothing_left(driver, good, 10)

    clock.run(main())


def test_whoever_shares_an_engine_with_a_suspect_is_not_blamed_for_it():
    async def main():
        engines = [FakeEngine(name) for name in "abc"]
        driver = Driver(engines[0])
        (guilty,) = start(driver, sampling=BY_ANNA)
        await settle()
        driver.add(engines[1])
        engines[0].end(EngineLost("gone"))
        await settle()
        (other,) = start(driver, sampling=BY_ANNA)
        await settle()
        driver.add(engines[2])
        engines[1].end(EngineLost("gone"), n=2)
        await settle()
        with pytest.raises(RequestRefused):
            await guilty
        engines[2].end()
        assert await other == COMPLETION

    clock.run(main())


def test_a_request_under_which_engines_are_lost_again_and_again_is_given_up_though_tokens_come():
    async def main():
        engines = [FakeEngine(str(number)) for number in range(MOST_LOSSES + 1)]
        driver = Driver()
        task, _ = watched(driver, sampling=BY_ANNA)
        for engine in engines[:MOST_LOSSES]:
            driver.add(engine)
            await settle()
            engine.grow(part(*range(1, 2)))
            engine.end(EngineLost("gone"))
            await settle()
        driver.add(engines[-1])
        with pytest.raises(RequestRefused, match="0 and 1 and 2 were lost"):
            await task
        assert engines[-1].requests == []

    clock.run(main())


def test_requests_of_workflows_are_no_suspects():
    async def main():
        engines = [FakeEngine(str(number)) for number in range(MOST_LOSSES + 1)]
        driver = Driver()
        tasks = start(driver, 2)
        for engine in engines[:MOST_LOSSES]:
            driver.add(engine)
            await settle()
            assert engine.running == 2
            engine.end(EngineLost("gone"), n=2)
        driver.add(engines[-1])
        await settle()
        engines[-1].end(n=2)
        assert await asyncio.gather(*tasks) == [COMPLETION] * 2
        assert driver.pool.status().suspects == ()

    clock.run(main())
