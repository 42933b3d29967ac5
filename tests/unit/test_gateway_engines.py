"""Live requests on the engine pool: handed on as they grow, whole over every loss, ended when users leave."""

import asyncio
from contextlib import aclosing

import pytest

from slipstream.backend.simulate import clock
from slipstream.rollout.engine.client import Aborted, EngineError, EngineLost, RequestRefused
from slipstream.rollout.engine.sampling import LiveSampling, request_fields
from slipstream.rollout.gateway.engines import PIECE, RETRY_ENGINES_S, RETRY_FULL_S, EngineTokens
from slipstream.rollout.gateway.source import (
    Exhausted,
    Finished,
    Interrupted,
    Rejected,
    TokenDelta,
    TokenRequest,
)
from slipstream.rollout.tokens.trajectory import Finish
from tests.unit.driven_pool import Driver, FakeEngine, mixed, part, settle, whole


def decode(tokens) -> str:
    """Token 1 is `a`, token 2 is `b`, ..."""
    return "".join(chr(ord("a") - 1 + token) for token in tokens)


def request(max_new_tokens: int = 8, **sampling) -> TokenRequest:
    return TokenRequest([7], {"max_new_tokens": max_new_tokens, **sampling})


class Asking:
    """A request whose deltas a test looks at one by one."""

    def __init__(self, driver: Driver, asked: TokenRequest | None = None, **sampling) -> None:
        self.source = EngineTokens(driver.pool, decode)
        self.deltas: list[TokenDelta] = []
        self.task = asyncio.create_task(self._read(asked or request(**sampling)))

    async def _read(self, asked: TokenRequest) -> list[TokenDelta]:
        async with aclosing(self.source.generate(asked)) as deltas:
            async for delta in deltas:
                self.deltas.append(delta)
        return self.deltas

    @property
    def tokens(self) -> list[list[int]]:
        return [list(delta.tokens) for delta in self.deltas]

    @property
    def all(self) -> list[int]:
        return [token for tokens in self.tokens for token in tokens]


def run(main) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await main()

    clock.run(limited())


def test_a_completion_is_handed_on_as_it_grows_with_the_engines_own_spans_at_the_end():
    async def main():
        engine = FakeEngine()
        asking = Asking(Driver(engine))
        await settle()
        for tokens in ([1], [1, 2, 3]):
            engine.grow(part(*tokens))
            await settle()
        engine.end(mixed(0, 0, 1, 1))
        await asking.task
        assert asking.tokens == [[1], [2, 3], [4]]
        assert [list(delta.spans) for delta in asking.deltas] == [[(0, 1)], [(0, 3)], [(0, 2), (1, 2)]]
        assert [delta.finish for delta in asking.deltas] == [None, None, Finished(Finish.STOP)]
        assert [logprob for delta in asking.deltas for logprob in delta.logprobs] == [-1, -2, -3, -4]

    run(main)


def test_what_comes_while_the_user_is_slow_is_one_delta():
    async def main():
        engine = FakeEngine()
        source = EngineTokens(Driver(engine).pool, decode)
        async with aclosing(source.generate(request())) as deltas:
            first = asyncio.create_task(anext(deltas))
            await settle()
            for n in (1, 2, 3):
                engine.grow(part(*range(1, n + 1)))
            await settle()
            engine.grow(part(1, 2, 3, 4))
            assert list((await first).tokens) == [1, 2, 3]
            assert list((await anext(deltas)).tokens) == [4]
            engine.end(whole(1, 2, 3, 4, 5))
            assert list((await anext(deltas)).tokens) == [5]

    run(main)


@pytest.mark.parametrize("max_new_tokens", [0, 4])
def test_the_log_probs_of_a_prompt_come_with_the_first_delta_also_without_a_new_token(max_new_tokens):
    async def main():
        engine = FakeEngine()
        asked = TokenRequest([7, 8], {"max_new_tokens": max_new_tokens}, top_logprobs=1, scores_prompt=True)
        asking = Asking(Driver(engine), asked)
        await settle()
        completion = engine.requests[0].completion
        assert completion.wants_prompt
        completion.prompt_logprobs, completion.prompt_alternatives = [None, -1.0], [(), ((-0.5, 3),)]
        completion.wants_prompt = False
        if max_new_tokens:
            engine.grow(part(1))
            await settle()
        engine.end(whole(1, 2) if max_new_tokens else whole(finish=Finish.LENGTH))
        first, *rest = await asking.task
        assert (first.prompt_logprobs, first.prompt_top_logprobs) == ([None, -1.0], [(), ((-0.5, 3),)])
        assert all(not delta.prompt_logprobs for delta in rest)
        assert asking.all == [1, 2][:max_new_tokens]

    run(main)


@pytest.mark.parametrize("loss", [EngineLost("gone"), Aborted("stop")], ids=["lost", "aborted"])
def test_a_lost_engine_is_a_pause_and_the_request_goes_on_from_its_prefix(loss):
    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        driver = Driver(bad)
        asking = Asking(driver, min_new_tokens=5)
        await settle()
        bad.grow(part(1, 2))
        driver.send(held=True)
        bad.end(loss, part(1, 2, 3))
        await settle()
        assert not asking.task.done()
        driver.add(good)
        driver.remove(bad)
        await settle()
        assert good.requests == [], "an update shows as a pause"
        driver.send(held=False)
        await settle()
        assert good.asked[0]["ids"] == [7, 1, 2, 3]
        good.end(whole(4, 5))
        await asking.task
        assert asking.all == [1, 2, 3, 4, 5]

    run(main)


def test_a_stop_string_that_begins_before_a_loss_and_ends_behind_it_is_found():
    async def main():
        engine = FakeEngine()
        asking = Asking(Driver(engine), stop=["zz", "bcd"])
        await settle()
        engine.end(Aborted("stop"), part(1, 2))
        await settle()
        engine.grow(part(3))
        await settle()
        assert not asking.task.done()
        engine.grow(part(3, 4, 5))
        await asking.task
        assert asking.all == [1, 2, 3, 4]
        last = asking.deltas[-1]
        assert last.finish == Finished(Finish.STOP, "bcd")
        assert sum(n for _, n in last.spans) == 4
        await settle()
        assert engine.requests[-1].future.cancelled(), "the engine goes on with nothing that nobody wants"

    run(main)


def test_a_stop_string_that_the_last_reply_completes_is_found_as_well():
    async def main():
        engine = FakeEngine()
        asking = Asking(Driver(engine), stop="bcd")
        await settle()
        engine.end(Aborted("stop"), part(1, 2))
        await settle()
        engine.end(whole(3, 4, 5))
        await asking.task
        assert asking.all == [1, 2, 3, 4]
        assert asking.deltas[-1].finish == Finished(Finish.STOP, "bcd")

    run(main)


@pytest.mark.parametrize("grammar", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_under_a_grammar_a_completion_starts_over_and_nothing_of_the_first_attempt_is_seen(grammar):
    async def main():
        engine = FakeEngine()
        asking = Asking(Driver(engine), request(100, **{grammar: "..."}))
        await settle()
        engine.grow(part(1, 2))
        engine.end(Aborted("stop"), part(1, 2, 3))
        await settle()
        assert asking.deltas == []
        assert engine.asked[1]["ids"] == [7]
        tokens = [8] * (PIECE + 3)
        engine.end(whole(*tokens))
        await asking.task
        assert [len(delta.tokens) for delta in asking.deltas] == [PIECE, 3, 0]
        assert asking.deltas[-1].finish == Finished(Finish.STOP)

    run(main)


def test_a_request_is_refused_at_once_without_room_and_without_an_engine():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine, max_concurrent=2)
        source = EngineTokens(driver.pool, decode)
        running = [source.generate(request()) for _ in range(2)]
        waits = [asyncio.create_task(anext(deltas)) for deltas in running]
        await asyncio.sleep(0)
        assert source.retry_after_s() == RETRY_FULL_S, "before the requests have reached the engine"
        with pytest.raises(Exhausted) as caught:
            await anext(source.generate(request()))
        assert caught.value.retry_after_s == RETRY_FULL_S
        await settle()
        driver.send(held=True)
        engine.end()
        await settle()
        await waits[0]
        await running[0].aclose()
        assert source.retry_after_s() is None, "a request waits for the end of an update"
        driver.remove(engine)
        assert source.retry_after_s() == RETRY_ENGINES_S
        for wait in waits[1:]:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await running[1].aclose()

    run(main)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(RequestRefused("bad regex"), Rejected), (EngineError("odd"), Interrupted)],
)
def test_an_error_says_whether_the_client_is_to_blame(error, raised):
    async def main():
        engine = FakeEngine()
        asking = Asking(Driver(engine))
        await settle()
        engine.end(error)
        with pytest.raises(raised, match=str(error)):
            await asking.task

    run(main)


def test_no_engine_for_too_long_interrupts():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine, wait_timeout_s=0.02)
        asking = Asking(driver)
        await settle()
        driver.remove(engine)
        with pytest.raises(Interrupted, match="no engine has served"):
            await asking.task

    run(main)


def test_a_user_who_leaves_ends_the_request_and_makes_room():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine, max_concurrent=1)
        asking = Asking(driver)
        await settle()
        engine.grow(part(1))
        await settle()
        asking.task.cancel()
        await asyncio.wait({asking.task})
        assert engine.requests[0].future.cancelled()
        assert driver.pool.status().in_use == 0
        again = Asking(driver)
        await settle()
        engine.end()
        await again.task

    run(main)


def test_the_fields_of_a_live_request():
    sampling = LiveSampling(
        8, {"temperature": 0.3, "min_new_tokens": 5, "stop": ["x"], "logit_bias": {"3": 1.0}}, 100, 2
    )
    fields = request_fields(sampling, done=0, tokens_left=8, greedy=False, stream_interval=64)
    assert fields == {
        "sampling_params": {
            "temperature": 0.3,
            "min_new_tokens": 5,
            "stop": ["x"],
            "logit_bias": {"3": 1.0},
            "max_new_tokens": 8,
            "stream_interval": 1,
        },
        "priority": 100,
        "top_logprobs_num": 2,
    }
    scoring = request_fields(
        sampling, done=0, tokens_left=8, greedy=False, stream_interval=64, scores_prompt=True
    )
    assert scoring["logprob_start_len"] == 0
    assert scoring["sampling_params"]["stream_interval"] == 64, "every chunk repeats them"
    for done, least in ((3, 2), (7, 0)):
        later = request_fields(sampling, done=done, tokens_left=8 - done, greedy=False, stream_interval=64)
        assert later["sampling_params"]["min_new_tokens"] == least
        assert later["sampling_params"]["max_new_tokens"] == 8 - done
        assert later["priority"] == 101, "an answer that has begun goes before those that have not"


def test_the_fields_of_an_agents_request():
    sampling = LiveSampling(8, {"temperature": 0.3}, priority=0)
    fields = request_fields(sampling, done=3, tokens_left=5, greedy=False, stream_interval=64)
    assert fields == {"sampling_params": {"temperature": 0.3, "max_new_tokens": 5, "stream_interval": 64}}, (
        "engines without users refuse a priority"
    )
    greedy = request_fields(sampling, done=0, tokens_left=8, greedy=True, stream_interval=64)
    assert greedy["sampling_params"]["temperature"] == 0.0
