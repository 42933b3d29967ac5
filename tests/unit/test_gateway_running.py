"""Turns that run: generated once for all readers, recorded once, cancelled when nobody reads."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.rollout.gateway.conversations import Answer, Arrival, User
from slipstream.rollout.gateway.serving.call import LiveCall
from slipstream.rollout.gateway.serving.contents import AnswerContents, Form
from slipstream.rollout.gateway.serving.running import RunningAnswer, RunningTurns
from slipstream.rollout.gateway.serving.text import GrowingText
from slipstream.rollout.gateway.sessions.placing import SessionLimits
from slipstream.rollout.gateway.sessions.running import RunningRequest
from slipstream.rollout.gateway.sessions.sessions import Sessions
from slipstream.rollout.gateway.source import Finished, Interrupted, TokenDelta, TokenRequest
from slipstream.rollout.tokens.trajectory import Finish
from slipstream.rollout.tokens.turn_entries import Entry, SessionEnd
from tests.watched_sessions import MemoryLog


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test with an event loop of its own."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


class Deltas:
    """A source that yields what is put into it."""

    version = 1

    def __init__(self) -> None:
        self.queue: asyncio.Queue[TokenDelta | Exception] = asyncio.Queue()
        self.is_closed = False

    def retry_after_s(self) -> None:
        return None

    async def generate(self, request: TokenRequest) -> AsyncGenerator[TokenDelta]:
        try:
            while True:
                delta = await self.queue.get()
                if isinstance(delta, Exception):
                    raise delta
                yield delta
        finally:
            self.is_closed = True


class Answers:
    """Conversations that keep what they are given."""

    def __init__(self) -> None:
        self.ended: list[Answer] = []

    def end(self, running: RunningRequest, answer: Answer) -> list[Entry]:
        self.ended.append(answer)
        return [SessionEnd(running.session, "key")]

    def recorded(self, running, choice, numbers) -> tuple[()]:
        return ()


class Scene:
    def __init__(self) -> None:
        self.source, self.answers, self.log = Deltas(), Answers(), MemoryLog()
        self.turns = RunningTurns(self.source, self.answers, self.log, clock=lambda: 7.0)  # pyright: ignore
        self._put = 0
        self.begun = running_request()

    def start(self, choices: int = 1, **text):
        request = TokenRequest([1], {"max_new_tokens": 9})
        return self.turns.start(
            self.begun, [request] * choices, lambda choice: new_answer(choice, self.begun, **text)
        )

    def put(self, text: bytes, finish: Finished | None = None, version: int = 1) -> None:
        self._put += len(text)
        self.source.queue.put_nowait(
            TokenDelta(list(text), [-0.5] * len(text), [(version, self._put)], finish=finish)
        )


ARRIVAL = Arrival(
    user=User("key"),
    session="s",
    turn_type=None,
    ends_session=False,
    digest=b"",
    retries=0,
    arrived_s=0.0,
    prompt_ids=[1],
    most_tokens=9,
)


def running_request() -> RunningRequest:
    sessions = Sessions(
        SessionLimits(1, 1 << 30, 9.0), temperature=1.0, override=False, decode=str, mint=lambda: "s"
    )
    return sessions.begin(ARRIVAL)


def new_answer(
    choice: int = 0, request: RunningRequest | None = None, *, one_by_one: bool = False, **more
) -> RunningAnswer:
    ends = {name: more.pop(name) for name in ("keeps_end_token", "end_tokens") if name in more}
    text = GrowingText(lambda ids: bytes(ids).decode(errors="replace"), **more)
    return RunningAnswer(request or running_request(), choice, text, one_by_one=one_by_one, **ends)


@pytest.mark.parametrize("splits", [[3], [1, 1, 1], [2, 0, 1], [3, 0]])
@pytest.mark.parametrize("keeps", [False, True])
def test_the_token_that_ends_an_answer_is_no_text_whenever_its_end_is_known(splits, keeps):
    """The end may be known later than its token: an engine's last word may come without tokens."""
    answer = new_answer(keeps_end_token=keeps, end_tokens={ord("."), ord("!")})
    tokens, given = list(b"ab."), 0
    for number, size in enumerate(splits, start=1):
        finish = STOP if number == len(splits) else None
        part = tokens[given : given + size]
        given += size
        answer.add(TokenDelta(part, [-0.5] * size, [(1, given)], finish=finish))
    assert (answer.text, answer.tokens) == ("ab." if keeps else "ab", list(b"ab."))
    assert "".join(step.text for step in answer.steps) == answer.text
    assert answer.steps[-1].tokens == 3


def test_a_possible_end_that_is_none_becomes_text():
    answer = new_answer(end_tokens={ord(".")})
    answer.add(TokenDelta(list(b"a."), [0, 0], [(1, 2)]))
    answer.add(TokenDelta(list(b"b"), [0], [(1, 3)], finish=Finished(Finish.LENGTH)))
    assert [step.text for step in answer.steps] == ["a", ".b"]


def test_tokens_become_steps_one_by_one_where_a_parser_needs_it():
    answer = new_answer(stops=["d"], one_by_one=True)
    answer.add(TokenDelta(list(b"abcdef"), [0] * 6, [(1, 6)]))
    assert [(step.text, step.tokens) for step in answer.steps] == [("a", 1), ("b", 2), ("c", 3), ("", 4)]
    assert (answer.finish, answer.tokens) == (Finished(Finish.STOP, "d"), list(b"abcd"))


async def read(answer: RunningAnswer) -> str:
    return "".join([step.text async for step in answer.read()])


STOP = Finished(Finish.STOP, ord("."))


@on_a_loop
async def test_two_readers_get_the_same_answer_and_it_is_recorded_once():
    scene = Scene()
    answers = scene.start()
    scene.put(b"ab")
    await answers[0].started()
    joined = scene.turns.join(scene.begun)
    readers = [asyncio.create_task(read(reading[0])) for reading in (answers, joined)]
    scene.put(b"c.", STOP)
    assert await asyncio.gather(*readers) == ["abc", "abc"]
    for text in ("first", "second"):
        await scene.turns.record(answers[0], {"role": "assistant", "content": text})
        scene.turns.leave(answers)
    [answer] = scene.answers.ended
    assert answer.message["content"] == "first"
    assert (answer.tokens, answer.spans) == (list(b"abc."), [(1, 4)])
    assert (answer.cancelled, answer.ended_s) == (False, 7.0)


@on_a_loop
async def test_the_last_reader_to_leave_cancels_the_generation():
    scene = Scene()
    answers = scene.start()
    scene.turns.join(scene.begun)
    scene.put(b"ab")
    await answers[0].started()
    scene.turns.leave(answers)
    await asyncio.sleep(0)
    assert not scene.source.is_closed and not scene.answers.ended
    scene.turns.leave(answers)
    await asyncio.gather(*(each.generating for each in answers), return_exceptions=True)
    assert scene.source.is_closed
    [answer] = scene.answers.ended
    assert (answer.text, answer.cancelled, answer.finish) == ("ab", True, None)
    assert scene.turns.answers == 0


@on_a_loop
async def test_an_answer_that_has_ended_and_that_nobody_has_got_is_cancelled_too():
    scene = Scene()
    answers = scene.start()
    scene.put(b"ab.", STOP)
    await answers[0].ended()
    scene.turns.leave(answers)
    assert [answer.cancelled for answer in scene.answers.ended] == [True]


@on_a_loop
async def test_a_stop_string_ends_the_generation_at_the_token_that_completes_it():
    scene = Scene()
    answers = scene.start(stops=["no"])
    scene.put(b"yes n")
    scene.put(b"o and more")
    await answers[0].ended()
    await asyncio.gather(*(each.generating for each in answers))
    answer = answers[0]
    assert (answer.text, answer.tokens, answer.spans) == ("yes ", list(b"yes no"), [(1, 6)])
    assert answer.finish == Finished(Finish.STOP, "no")
    assert len(answer.logprobs) == 6
    assert scene.source.is_closed


@on_a_loop
async def test_a_failure_reaches_the_reader_after_what_came_before_it():
    scene = Scene()
    answers = scene.start()
    scene.put(b"ab")
    scene.source.queue.put_nowait(Interrupted("gone"))
    parts = []

    async def collect() -> None:
        async for step in answers[0].read():
            parts.append(step.text)

    with pytest.raises(Interrupted, match="gone"):
        await collect()
    assert parts == ["ab"]


@on_a_loop
async def test_closing_cancels_all_turns_and_waits_until_they_are_durable():
    scene = Scene()
    scene.log.hold()
    scene.start(choices=2)
    closing = asyncio.create_task(scene.turns.close())
    await asyncio.sleep(0)
    assert not closing.done()
    scene.log.release()
    await asyncio.wait_for(closing, 60)
    assert len(scene.answers.ended) == 2


@on_a_loop
async def test_the_number_of_answers_that_are_generated_follows_every_end():
    scene = Scene()
    answers = scene.start(choices=3)
    assert scene.turns.answers == 3
    scene.put(b"a.", STOP)
    await answers[0].ended()
    assert scene.turns.answers == 2
    assert [scene.turns.abort(each) for each in answers] == [False, True, True]
    assert scene.turns.answers == 0
    scene.turns.leave(answers)

    at_once = scene.start()
    scene.turns.leave(at_once)
    assert scene.turns.answers == 0, "its task has not even begun"
    await asyncio.gather(*(each.generating for each in at_once), return_exceptions=True)
    assert scene.turns.answers == 0


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("streams", [False, True])
def test_a_call_may_end_while_another_task_reads_its_contents(choices, streams):
    @on_a_loop
    async def run() -> None:
        scene = Scene()
        tokenizer: Any = SimpleNamespace(decode=lambda ids: bytes(ids).decode())
        shared = SimpleNamespace(turns=scene.turns, contents=AnswerContents(tokenizer, lambda: 1))
        call = LiveCall(shared, ARRIVAL, {}, None)  # pyright: ignore
        call.answers = scene.start(choices)
        generating = [answer.generating for answer in call.answers if answer.generating]
        contents = call.contents(Form("id", streams))
        reader = asyncio.create_task(read_all(contents))
        scene.put(b"ab")
        await call.answers[0].started()
        await asyncio.sleep(0)
        await call.end()
        await asyncio.wait({reader, *generating}, timeout=60)
        assert reader.done()
        assert [answer.cancelled for answer in scene.answers.ended] == [True] * choices
        assert not contents.ag_running

    run()


async def read_all(contents: AsyncGenerator[object]) -> list[object]:
    return [part async for part in contents]
