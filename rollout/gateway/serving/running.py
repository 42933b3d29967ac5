"""Turns that run: each is generated once, however many clients read it, and recorded once.

    source ──deltas──► RunningAnswer ──steps──► reader (a request)
                                     └─steps──► reader (its retry, which has joined)

A turn runs in tasks of its own, one for each answer. When its last reader leaves before the end, it is
cancelled, and recorded as that.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

from slipstream.rollout.engine.growing import Alternatives
from slipstream.rollout.gateway.conversations import (
    Answer,
    Arrival,
    ChatMessage,
    ClientReward,
    EntryLog,
    ListedSession,
    NamedAnswer,
    TakenReward,
    User,
)
from slipstream.rollout.gateway.serving.text import GrowingText
from slipstream.rollout.gateway.sessions.running import RunningRequest
from slipstream.rollout.gateway.source import (
    Finished,
    Interrupted,
    TokenDelta,
    TokenRequest,
    TokenSource,
)
from slipstream.rollout.system.changes import Changes
from slipstream.rollout.system.steady_clock import steady_s
from slipstream.rollout.tokens.trajectory import Finish
from slipstream.rollout.tokens.turn_entries import Entry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A part of an answer that readers get at once."""

    text: str
    tokens: int
    """Number of tokens so far."""
    finish: Finished | None


class RunningAnswer:
    """One completion as it grows, with its text. Everything in it is only added to."""

    def __init__(
        self,
        request: RunningRequest,
        choice: int,
        text: GrowingText,
        *,
        keeps_end_token: bool = False,
        end_tokens: Collection[int] = (),
        one_by_one: bool = False,
    ) -> None:
        """``choice``: place of the answer among those to the same prompt. ``keeps_end_token``: the token that
        ends the answer is part of its text.

        ``end_tokens``: ids that may turn out to be such a token, so that their text waits for what follows.
        ``one_by_one``: each token is a step, as SGLang's streaming parsers of tool calls need it: of several
        calls in one step they find the first.
        """
        self.request = request
        self.choice = choice
        self._text = text
        self._keeps_end_token = keeps_end_token
        self._end_tokens = end_tokens
        self._one_by_one = one_by_one
        self._decoded = 0
        """Number of tokens whose text has been looked at."""
        self._changes = Changes()
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[Alternatives] = []
        self.prompt_logprobs: Sequence[float | None] = ()
        """Log-prob of each prompt token, if they were asked for; None for the first."""
        self.prompt_top_logprobs: Sequence[Alternatives] = ()
        self.spans: Sequence[tuple[int, int]] = ()
        self.cached_tokens = 0
        self.finish: Finished | None = None
        self.failure: Exception | None = None
        self.steps: list[AnswerPart] = []
        self.readers = 1
        """Number of requests that read it: the one that has begun it, and its retries."""
        self.generating: asyncio.Task[None] | None = None
        self.recorded: asyncio.Task[None] | None = None
        """Ends when the answer is durable; None: nobody has recorded it yet."""

    @property
    def text(self) -> str:
        return self._text.text

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.failure is not None

    def add(self, delta: TokenDelta) -> None:
        """Append a delta. The completion ends with it, or earlier if its text holds a stop string."""
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.top_logprobs += delta.top_logprobs
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        if delta.prompt_logprobs:
            self.prompt_logprobs, self.prompt_top_logprobs = delta.prompt_logprobs, delta.prompt_top_logprobs
        shown = self._shown(delta.finish)
        size = 1 if self._one_by_one else max(1, shown - self._decoded)
        for start in range(self._decoded, shown, size):
            self._decoded += self._text.add(self.tokens[start : min(start + size, shown)])
            if self._text.matched is not None:
                break
            if delta.finish is None or start + size < shown:  # the last part comes with the end
                self._add_step(None)
        self.spans = delta.spans
        if self._text.matched is not None:
            self._cut(self._decoded)
            self._end(Finished(Finish.STOP, self._text.matched))
        elif delta.finish is not None:
            self._end(delta.finish)

    def _shown(self, finish: Finished | None) -> int:
        """Return the number of tokens whose text is known to belong to the answer."""
        end = len(self.tokens)
        if finish is None:
            while end > self._decoded and self.tokens[end - 1] in self._end_tokens:
                end -= 1
        elif self.tokens and self.tokens[-1] == finish.matched and not self._keeps_end_token:
            end -= 1
        return end

    def _cut(self, tokens: int) -> None:
        del self.tokens[tokens:], self.logprobs[tokens:], self.top_logprobs[tokens:]
        self.spans = _first(self.spans, tokens)

    def _end(self, finish: Finished) -> None:
        self._text.end()
        if self._text.matched is not None:  # by bytes that waited for the rest of a character
            finish = Finished(Finish.STOP, self._text.matched)
        self.finish = finish
        self._add_step(finish)

    def _add_step(self, finish: Finished | None) -> None:
        text = self._text.take(final=finish is not None)
        if text or finish is not None:
            tokens = self._decoded if finish is None else len(self.tokens)
            self.steps.append(AnswerPart(text, tokens, finish))
            self._changes.notify()

    def abort(self) -> None:
        """End the answer where it is, unless it has ended."""
        if not self.is_over:
            self.add(TokenDelta((), (), self.spans, finish=Finished(Finish.PARTIAL)))

    @property
    def is_aborted(self) -> bool:
        return self.finish is not None and self.finish.finish is Finish.PARTIAL

    def stop(self) -> None:
        """End the generation, whatever becomes of the answer."""
        if self.generating is not None:
            self.generating.cancel()

    def fail(self, error: Exception) -> None:
        self.failure = error
        self._changes.notify()

    async def read(self) -> AsyncGenerator[AnswerPart]:
        """Yield all steps from the first one on. Raises the failure of the generation."""
        read = 0

        def news() -> bool | None:
            return True if len(self.steps) > read or self.is_over else None

        while True:
            await self._changes.first(news)
            for step in self.steps[read:]:
                read += 1
                yield step
                if step.finish is not None:
                    return
            if self.failure is not None and read == len(self.steps):
                raise self.failure

    async def ended(self) -> None:
        """Wait until no step follows. Raises the failure of the generation."""
        await self._changes.first(lambda: self.is_over or None)
        if self.failure is not None:
            raise self.failure

    async def started(self) -> None:
        """Wait for the first step. Raises the failure of the generation if there is none."""
        await self._changes.first(lambda: bool(self.steps) or self.is_over or None)
        if self.failure is not None and not self.steps:
            raise self.failure


def _first(spans: Sequence[tuple[int, int]], tokens: int) -> Sequence[tuple[int, int]]:
    """Return the spans of the first ``tokens`` tokens."""
    kept: list[tuple[int, int]] = []
    for version, length in spans:
        if tokens <= 0:
            break
        kept.append((version, min(length, tokens)))
        tokens -= length
    return kept


class Conversations(Protocol):
    """All sessions of one gateway process. Plain calls on one event loop: none of them waits."""

    def begin(self, arrival: Arrival) -> RunningRequest:
        """Place a request, which then has room for an answer of a token at least; or return the one that
        runs already and that it repeats.

        Raises PromptTooLong and another ValueError for what the client did wrong, and TooManySessions:
        nothing has changed then.
        """
        ...

    def end(self, running: RunningRequest, answer: Answer) -> Sequence[Entry]:
        """Store an answer and return what is to be recorded of it. Called once for each choice."""
        ...

    def recorded(self, running: RunningRequest, choice: int, numbers: Sequence[int]) -> Sequence[Entry]:
        """Learn the numbers of the entries that ``end`` has returned. Return what is to be recorded next: it
        names one of them.
        """
        ...

    def reward(self, user: User, reward: ClientReward) -> TakenReward:
        """Return the turns that a client's reward goes to, with what is to be recorded.

        Raises UnknownTurn, AmbiguousTurn and GivenBefore, and ValueError for a reward that is not finite.
        """
        ...

    def open_sessions(
        self, user: User, count: int, tags: Mapping[str, object], *, is_group: bool, once: str, now_s: float
    ) -> tuple[list[str], Sequence[Entry]]:
        """Open sessions whose turns the client rewards itself. Return their names, and what to record, which
        is nothing where the request named ``once`` has opened them before.

        Raises TooManySessions and GivenBefore.
        """
        ...

    def listed(self, user: User, name: str | None = None) -> Iterator[ListedSession]:
        """Return the sessions of a user, or the one of a name. Raises UnknownTurn at once."""
        ...

    def forget(self, session: str | None, key: str | None) -> Sequence[Entry]:
        """Drop a session, the sessions of a key, or the session of a key."""
        ...

    def end_session(self, user: User, session: str) -> Sequence[Entry]:
        """End a session without a request. Raises UnknownTurn."""
        ...

    def answer_of(self, user: User, request: str) -> NamedAnswer | None:
        """Return the answer to a request of this user; None: none that can be named, or not any more."""
        ...


class RunningTurns:
    """All turns of this process that run."""

    def __init__(
        self,
        source: TokenSource,
        conversations: Conversations,
        entries: EntryLog,
        *,
        clock: Callable[[], float] = steady_s,
    ) -> None:
        self._source = source
        self._conversations = conversations
        self._entries = entries
        self._clock = clock
        self._turns: dict[RunningRequest, list[RunningAnswer]] = {}
        self._growing: set[RunningAnswer] = set()
        self._recording: set[asyncio.Task[None]] = set()

    @property
    def answers(self) -> int:
        """Number of answers that are generated now. Every request asks, so that it must not count them."""
        return len(self._growing)

    def start(
        self,
        running: RunningRequest,
        requests: Sequence[TokenRequest],
        new_answer: Callable[[int], RunningAnswer],
    ) -> list[RunningAnswer]:
        """Record what the arrival adds to the journal, and begin to generate one answer for each request.

        The caller reads the answers, and leaves them at the end.
        """
        if running.entries:
            self._entries.append(running.entries)
        answers = self._turns[running] = [new_answer(choice) for choice in range(len(requests))]
        self._growing.update(answers)
        loop = asyncio.get_running_loop()
        for request, answer in zip(requests, answers, strict=True):
            answer.generating = loop.create_task(
                self._generate(request, answer), name=f"answer in session {running.session}"
            )
        return answers

    def join(self, running: RunningRequest) -> list[RunningAnswer]:
        """Return the answers to a request that runs already, which the caller reads and leaves at the end;
        none if it was not started yet.
        """
        answers = self._turns.get(running, [])
        for answer in answers:
            answer.readers += 1
        return answers

    async def _generate(self, request: TokenRequest, answer: RunningAnswer) -> None:
        try:
            async with aclosing(self._source.generate(request)) as deltas:
                async for delta in deltas:
                    answer.add(delta)
                    if answer.finish is not None:
                        self._growing.discard(answer)
                        return
            answer.fail(Interrupted("the completion stopped before its end"))
        except Exception as error:
            answer.fail(error)
        finally:
            self._growing.discard(answer)

    async def record(self, answer: RunningAnswer, message: ChatMessage, exchange: bytes = b"") -> None:
        """Record an answer that has ended, and wait until it is durable. The first message counts."""
        if answer.recorded is None:
            self._record(answer, message, exchange, cancelled=answer.is_aborted)
        assert answer.recorded is not None
        await asyncio.shield(answer.recorded)

    def abort(self, answer: RunningAnswer) -> bool:
        """End an answer where it is. Return False if it had ended."""
        if answer.is_over:
            return False
        answer.stop()
        answer.abort()
        self._growing.discard(answer)
        return True

    def leave(self, answers: Sequence[RunningAnswer]) -> None:
        """End to read answers. What the last reader of one leaves unrecorded is cancelled."""
        for answer in answers:
            answer.readers -= 1
            if answer.readers:
                continue
            answer.stop()
            self._growing.discard(answer)
            if answer.recorded is None:
                message = {"role": "assistant", "content": answer.text}
                self._record(answer, message, b"", cancelled=True)
            if not answer.is_over:
                answer.fail(Interrupted("its last reader has left"))
            self._turns.pop(answer.request, None)

    async def close(self) -> None:
        """Cancel all answers, and wait until they are recorded."""
        for answers in list(self._turns.values()):
            for answer in answers:
                answer.readers = 1
            self.leave(answers)
        await asyncio.gather(*self._recording, return_exceptions=True)

    def _record(
        self, answer: RunningAnswer, message: ChatMessage, exchange: bytes, *, cancelled: bool
    ) -> None:
        running, choice = answer.request, answer.choice
        entries = self._conversations.end(
            running,
            Answer(
                choice,
                answer.tokens,
                answer.logprobs,
                answer.spans,
                answer.finish,
                answer.text,
                message,
                cancelled,
                self._clock(),
                exchange,
            ),
        )
        numbers = self._entries.append(entries)
        more = self._conversations.recorded(running, choice, numbers)
        if more:
            numbers = self._entries.append(more)
        answer.recorded = asyncio.get_running_loop().create_task(
            self._durable(numbers), name=f"recording a turn of session {running.session}"
        )
        self._recording.add(answer.recorded)
        answer.recorded.add_done_callback(self._recorded)

    async def _durable(self, numbers: Sequence[int]) -> None:
        if numbers:
            await self._entries.durable(numbers[-1])

    def _recorded(self, recording: asyncio.Task[None]) -> None:
        self._recording.discard(recording)
        with suppress(asyncio.CancelledError):
            if error := recording.exception():
                log.error("%s failed: %s", recording.get_name(), error)
