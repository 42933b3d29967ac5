"""The engine pool: a request survives the loss of engines, and leaves nothing behind however it ends."""

import asyncio
import random
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.client import Aborted, EngineError, EngineLost, InvalidRequest, Silent
from slipstream.rollout.engine.connection import EngineAddress
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.pool import SILENCES, EnginePool, NoEngine
from slipstream.rollout.engine.routing import LostEngine, Routing, ServingEngine
from slipstream.rollout.engine.trace import RequestTrace
from slipstream.rollout.trajectory import Completion, Finish, Span

SAMPLING = SamplingConfig(max_new_tokens=4)
COMPLETION = Completion((1, 2), (-1.0, -1.0), (Span(0, 0, 2),), Finish.STOP)


def part(*tokens: int, version: int = 0, finish=Finish.PARTIAL, retractions: int = 0) -> Completion:
    spans = (Span(version, 0, len(tokens)),) if tokens else ()
    return Completion(tokens, tuple(-float(token) for token in tokens), spans, finish, retractions)


def whole(*tokens: int, **more) -> Completion:
    return part(*tokens, **{"finish": Finish.STOP} | more)


def mixed(*versions: int, finish=Finish.STOP) -> Completion:
    """Token k is k + 1, of the k-th of ``versions``."""
    completion = GrowingCompletion()
    for token, version in enumerate(versions, 1):
        completion.add(version, [token], [-float(token)])
    completion.finish = finish
    return completion.completion()


def growing(completion: Completion) -> GrowingCompletion:
    """Return a completion that has arrived already."""
    copy = GrowingCompletion()
    arrive(copy, completion)
    return copy


def arrive(completion: GrowingCompletion, new: Completion) -> None:
    for span in new.spans:
        tokens, logprobs = new.tokens[span.start : span.end], new.logprobs[span.start : span.end]
        completion.add(span.version, tokens, logprobs)
    completion.finish = new.finish
    completion.retractions += new.retractions


@dataclass(eq=False)
class Request:
    """A request that runs until the test ends it."""

    asked: dict
    completion: GrowingCompletion
    grown: object
    future: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        self._start = len(self.completion.tokens)

    def becomes(self, reply: Completion) -> None:
        """All of the reply so far: its tokens stay the same, but their versions may change."""
        self.completion.cut(self._start)
        arrive(self.completion, reply)


class FakeEngine:
    """A client whose requests grow and end when, and how, the test says."""

    def __init__(self, name: str = "engine") -> None:
        self.name = name
        self.requests: list[Request] = []
        self.closed = 0
        self.ignores_close = False

    @property
    def asked(self) -> list[dict]:
        return [request.asked for request in self.requests]

    @property
    def running(self) -> int:
        return sum(not request.future.done() for request in self.requests)

    async def generate(
        self, input_ids, sampling, completion, *, greedy=False, cache_key=None, version, grown=None
    ) -> None:
        asked = {
            "ids": [*input_ids, *completion.tokens],
            "budget": completion.tokens_left(sampling.max_new_tokens),
            "greedy": greedy,
            "key": cache_key,
            "version": version,
        }
        self.requests.append(Request(asked, completion, grown))
        await self.requests[-1].future

    async def close(self) -> None:
        self.closed += 1
        if not self.ignores_close:
            self.end(EngineLost("closed"), n=len(self.requests))

    def grow(self, reply: Completion) -> None:
        """Let the reply to the oldest running request have grown to ``reply``."""
        request = next(request for request in self.requests if not request.future.done())
        request.becomes(reply)
        request.grown()

    def end(self, outcome=COMPLETION, reply: Completion | None = None, n: int = 1) -> None:
        """End the ``n`` oldest running requests: with a completion, or an error and the reply until then."""
        for request in [request for request in self.requests if not request.future.done()][:n]:
            if isinstance(outcome, Exception):
                if reply is not None:
                    request.becomes(reply)
                request.future.set_exception(outcome)
            else:
                request.becomes(outcome)
                request.future.set_result(None)


class Driver:
    """Sends routing records to a pool."""

    def __init__(
        self, *engines: FakeEngine, max_concurrent=10, wait_timeout_s=5.0, isolate_versions=False, **more
    ) -> None:
        self._clients: dict[str, FakeEngine] = {}
        self._serving: dict[FakeEngine, ServingEngine] = {}
        self._lives = 0
        self.record = Routing(0, 0, False, max_concurrent)
        self.reports = 0
        self.pool = EnginePool(
            wait_timeout_s=wait_timeout_s,
            isolate_versions=isolate_versions,
            connect=lambda address: self._clients[address.url],
            report=self._report,
            **more,
        )
        for engine in engines:
            self.add(engine)

    def _report(self) -> None:
        self.reports += 1

    def send(self, **changes) -> None:
        """Put the next record into force, as it comes over a connection."""
        record = msgspec.structs.replace(
            self.record,
            number=self.record.number + 1,
            engines=tuple(self._serving.values()),
            **changes,
        )
        self.record = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=Routing)
        self.pool.follow(self.record)

    def add(self, engine: FakeEngine) -> None:
        self._lives += 1
        url = f"http://{engine.name}/{self._lives}"
        self._clients[url] = engine
        address = EngineAddress(engine.name, url, 1, 100, 100, timeout_s=5)
        self._serving[engine] = ServingEngine(address, self._lives)
        self.send()

    def remove(self, engine: FakeEngine) -> None:
        del self._serving[engine]
        self.send()

    def doubt(self, version: int | None, *engines: FakeEngine) -> None:
        for engine in engines or list(self._serving):
            self._serving[engine] = msgspec.structs.replace(self._serving[engine], doubted=version)
        self.send()

    def trust(self, engine: FakeEngine) -> None:
        self.doubt(None, engine)

    @property
    def lost(self) -> list[tuple[str, str]]:
        return [(lost.name, lost.reason) for lost in self.pool.status().lost]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def start(
    driver: Driver, n: int = 1, sampling: SamplingConfig = SAMPLING, prefix: Completion | None = None, **more
) -> list[asyncio.Task[Completion]]:
    async def generate() -> Completion:
        completion = growing(prefix) if prefix is not None else GrowingCompletion()
        await driver.pool.generate([7], sampling, completion, **more)
        return completion.completion()

    return [asyncio.create_task(generate()) for _ in range(n)]


def watched(driver: Driver, **more) -> tuple[asyncio.Task[Completion], list[Completion]]:
    """Start a request. Return it, and the completion each time that its caller is told of growth."""
    completion, seen = GrowingCompletion(), []

    async def generate() -> Completion:
        def grown() -> None:
            seen.append(completion.completion())

        prefix = more.pop("prefix", None)
        if prefix is not None:
            arrive(completion, prefix)
        sampling = more.pop("sampling", SAMPLING)
        await driver.pool.generate([7], sampling, completion, grown=grown, **more)
        return completion.completion()

    return asyncio.create_task(generate()), seen


async def assert_nothing_left(driver: Driver, engine: FakeEngine, max_concurrent: int) -> None:
    """Every permit is back: as many requests as allowed run at once, and one more waits."""
    before = len(engine.requests)
    tasks = start(driver, n=max_concurrent + 1)
    await settle()
    assert len(engine.requests) - before == max_concurrent
    engine.end(n=max_concurrent)
    await settle()
    engine.end()
    assert await asyncio.gather(*tasks) == [COMPLETION] * (max_concurrent + 1)
    status = driver.pool.status()
    assert (status.running, status.in_use) == (0, 0)


def asked(ids: list[int], budget: int, **more) -> dict:
    return {"ids": ids, "budget": budget, "greedy": False, "key": None, "version": 0} | more


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


def test_no_engine_for_too_long_is_an_error_that_names_the_time_and_leaves_nothing_behind():
    async def main():
        driver, engine = Driver(max_concurrent=2, wait_timeout_s=0.02), FakeEngine()
        driver.send()
        for error in await asyncio.gather(*start(driver, 4), return_exceptions=True):
            assert isinstance(error, NoEngine)
            assert "no engine has served for 0 s" in str(error)
        driver.add(engine)
        await assert_nothing_left(driver, engine, 2)

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


def test_an_interrupted_completion_that_has_used_its_budget_is_not_asked_for_again():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        (task,) = start(driver)
        await settle()
        engine.end(EngineLost("gone"), part(1, 2, 3, 4))
        assert await task == whole(1, 2, 3, 4, finish=Finish.LENGTH)
        assert len(engine.requests) == 1

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


# ---- routing records


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


def test_the_driver_is_told_which_record_is_in_force():
    async def main():
        driver = Driver()
        for _ in range(3):
            before = driver.reports
            driver.send()
            assert driver.reports == before + 1
            assert driver.pool.status().number == driver.record.number

    asyncio.run(main())


def test_closing_a_pool_closes_every_connection():
    async def main():
        engines = [FakeEngine("a"), FakeEngine("b"), FakeEngine("c")]
        driver = Driver(*engines)
        driver.remove(engines[0])
        await driver.pool.close()
        assert [engine.closed for engine in engines] == [1, 1, 1]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


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

    asyncio.run(main())


def test_clocks_are_told_once_that_requests_are_held_and_once_that_they_go_on():
    async def main():
        said: list[bool] = []
        driver = Driver(FakeEngine(), on_held=said.append)
        assert said == []
        for held in (True, True, False, False, True):
            driver.send(held=held)
            assert driver.pool.held == held
        assert said == [True, False, True]

    asyncio.run(main())


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

    asyncio.run(main())


# ---- weights in doubt


def test_a_completion_with_tokens_of_a_version_in_doubt_waits_for_the_verdict():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        [task] = start(driver)
        await settle()
        driver.doubt(5)
        engine.end(mixed(4, 5))
        await settle()
        assert not task.done()
        assert driver.pool.status().running == 0, "who drains the engines does not wait for it"
        driver.trust(engine)
        assert await task == mixed(4, 5)

    asyncio.run(main())


def test_a_completion_of_older_versions_waits_for_nothing():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        [task] = start(driver)
        await settle()
        driver.doubt(5)
        engine.end(mixed(3, 4))
        assert await task == mixed(3, 4)

    asyncio.run(main())


def test_a_verdict_may_come_with_the_doubt_about_the_next_version():
    """The record that says that 5 is trusted may be missed, and the next one says that 6 is in doubt."""

    async def main():
        engine = FakeEngine()
        driver = Driver(engine, max_concurrent=2)
        driver.doubt(5)
        older, newer = start(driver, 2)
        await settle()
        engine.end(mixed(4, 5))
        engine.end(mixed(5, 6))
        await settle()
        assert not older.done()
        driver.doubt(6)
        assert await older == mixed(4, 5)
        await settle()
        assert not newer.done()
        driver.trust(engine)
        assert await newer == mixed(5, 6)

    asyncio.run(main())


def test_tokens_of_an_engine_that_is_trusted_are_not_in_doubt_because_of_the_next_engine():
    async def main():
        first, second = FakeEngine("first"), FakeEngine("second")
        driver = Driver(first)
        [task] = start(driver)
        await settle()
        driver.add(second)
        driver.doubt(5)
        driver.trust(first)
        first.end(Aborted("stop", attested=True), mixed(5, 5, finish=Finish.PARTIAL))
        driver.remove(first)
        await settle()
        assert second.asked == [asked([7, 1, 2], 2)]
        second.end(whole(9, version=4))
        assert (await task).tokens == (1, 2, 9)

    asyncio.run(main())


def test_tokens_of_a_condemned_engine_from_the_version_in_doubt_are_sampled_again_elsewhere():
    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        driver = Driver(bad)
        [task] = start(driver)
        await settle()
        driver.add(good)
        driver.doubt(5)
        bad.end(mixed(4, 4, 5))
        await settle()
        driver.trust(good)
        driver.remove(bad)
        await settle()
        assert driver.lost == []
        assert good.asked == [asked([7, 1, 2], 2)], "the two tokens of version 4 are kept"
        good.end(whole(9, version=5))
        completion = await task
        assert completion.tokens == (1, 2, 9)
        assert [span.version for span in completion.spans] == [4, 5]
        assert driver.pool.tokens_generated == 3

    asyncio.run(main())


def test_a_request_that_was_only_sampled_in_doubt_begins_again():
    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        driver = Driver(bad)
        driver.doubt(5)
        [task] = start(driver)
        await settle()
        bad.end(mixed(5, 5))
        await settle()
        driver.remove(bad)
        driver.add(good)
        await settle()
        assert good.asked == [asked([7], 4)]
        good.end(whole(3, version=5))
        assert (await task).tokens == (3,)

    asyncio.run(main())


def test_growth_in_doubt_is_told_to_nobody_until_the_next_after_the_verdict():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        task, seen = watched(driver)
        await settle()
        engine.grow(part(1, version=4))
        driver.doubt(5)
        engine.grow(part(1, 2, version=4))  # perhaps newer than it says
        assert [len(so_far.tokens) for so_far in seen] == [1]
        driver.trust(engine)
        engine.grow(part(1, 2, 3, version=4))
        assert [len(so_far.tokens) for so_far in seen] == [1, 3]
        engine.end(mixed(4, 5, 5))
        await task

    asyncio.run(main())


@pytest.mark.parametrize("cut", [EngineLost, Silent, Aborted])
def test_of_a_reply_that_is_cut_in_doubt_without_its_versions_only_what_was_told_before_is_kept(cut):
    """Until the engine has said the versions of the tokens, any of them may be of the version in doubt."""

    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        driver = Driver(bad)
        task, _ = watched(driver)
        await settle()
        bad.grow(part(1, version=4))
        driver.doubt(5)
        bad.grow(part(1, 2, version=4))
        driver.add(good)
        bad.end(cut("x"), part(1, 2, 3, version=4))
        await settle()
        assert [asked["ids"] for asked in bad.asked[1:] + good.asked] == [[7, 1]]
        (good if good.running else bad).end(whole(9, version=4))
        assert (await task).tokens == (1, 9)

    asyncio.run(main())


@pytest.mark.parametrize("end", ["cancelled", "refused", "cancelled before the verdict"])
def test_whoever_gives_a_request_up_in_doubt_is_left_with_what_it_was_told(end):
    """It may be written down, and be continued after a restart."""

    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        completion = GrowingCompletion()
        task = asyncio.create_task(driver.pool.generate([7], SAMPLING, completion))
        await settle()
        engine.grow(part(1, version=4))
        driver.doubt(5)
        engine.grow(part(1, 2, version=4))
        if end == "refused":
            engine.end(EngineError("no"))
        elif end == "cancelled":
            task.cancel()
        else:
            engine.end(mixed(4, 5, 5))
            await settle()
            task.cancel()
        await asyncio.wait({task})
        assert completion.completion() == part(1, version=4)

    asyncio.run(main())


def test_a_completion_aborted_in_doubt_keeps_its_tokens_of_older_versions():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        [task] = start(driver)
        await settle()
        driver.doubt(5)
        engine.end(Aborted("paused", attested=True), mixed(4, 4, 5, finish=Finish.PARTIAL))
        await settle()
        assert engine.asked[1]["ids"] == [7, 1, 2]
        driver.trust(engine)
        engine.end(whole(9, version=5))
        assert (await task).tokens == (1, 2, 9)

    asyncio.run(main())


def test_a_completion_of_an_engine_that_was_given_up_without_a_verdict_is_not_believed():
    """It missed a version: what it says of its tokens may be as wrong as its weights."""

    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        bad.ignores_close = True
        driver = Driver(bad)
        [task] = start(driver)
        await settle()
        driver.doubt(5)
        driver.remove(bad)
        driver.add(good)
        bad.end(mixed(4, 5))
        await settle()
        assert good.asked == [asked([7, 1], 3)]
        good.end(whole(9, version=5))
        await task

    asyncio.run(main())


def test_without_a_verdict_in_time_the_engine_is_given_up():
    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        driver = Driver(bad, wait_timeout_s=0.1)
        [task] = start(driver)
        await settle()
        driver.doubt(5)
        bad.end(mixed(5))
        driver.add(good)
        await asyncio.sleep(0.2)
        assert driver.lost == [("bad", "no verdict on its weights in 0.1 s")]
        good.end(whole(9, version=5))
        assert (await task).tokens == (9,)

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_no_token_that_was_told_is_taken_back_and_none_of_wrong_weights_is_told(seed):
    """Tokens name the engine, and whether its weights were right: wrong ones are odd."""
    chance = random.Random(seed)

    async def main():
        driver = Driver(max_concurrent=1)
        task, seen = watched(driver, sampling=SamplingConfig(max_new_tokens=60))
        version, engine, wrong, history = 0, None, False, []
        for _ in range(400):
            await settle()
            if task.done():
                break
            if engine is None:
                engine, wrong, history = FakeEngine(f"engine-{version}"), False, []
                driver.add(engine)
                await settle()
            doubted = driver._serving[engine].doubted
            event = chance.choice(
                ["grow", "grow", "grow", "end", "abort", "silence", "lose", "doubt", "judge"]
            )
            if event in ("grow", "end", "abort") and engine.running:
                history += [(2 * version + wrong, version)] * chance.randint(1, 3)
            exact = GrowingCompletion()
            for token, v in history:
                exact.add(v, [token], [-float(token)])
            bounds = part(*(token for token, _ in history), version=history[0][1] if history else 0)
            if event == "doubt" and doubted is None:
                version += 1
                driver.doubt(version)
                wrong = chance.random() < 0.5
            elif event in ("judge", "lose") and doubted is not None:
                driver.remove(engine) if wrong or event == "lose" else driver.trust(engine)
                engine = None if wrong or event == "lose" else engine
            elif not engine.running:
                continue
            elif event == "grow":
                engine.grow(bounds)
            elif event == "end":
                exact.finish = Finish.STOP if chance.random() < 0.2 else Finish.LENGTH
                engine.end(exact.completion())
            elif event in ("abort", "silence"):
                attested = event == "abort" and chance.random() < 0.7
                error = Silent("x") if event == "silence" else Aborted("x", attested=attested)
                engine.end(error, exact.completion() if attested else bounds)
            if engine is not None and not engine.running:
                history = []
        task.cancel()
        await asyncio.wait({task})
        told = [so_far.tokens for so_far in seen]
        final = () if task.cancelled() or task.exception() else task.result().tokens
        assert all(token % 2 == 0 for tokens in [*told, final] for token in tokens)
        for before, after in pairwise([*told, *([final] if final else [])]):
            assert after[: len(before)] == before

    asyncio.run(main())
