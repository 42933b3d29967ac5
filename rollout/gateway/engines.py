"""The token source of a gateway: an engine pool, whose completions are handed on as they grow.

    TokenRequest ──► EnginePool.generate ──► GrowingCompletion ──grown──► TokenDelta, TokenDelta, ..., finish

A delta holds what the pool promises to keep. Updates, doubts about weights and lost engines delay the next
delta and nothing else. Two kinds of requests need care when their engine is lost, because the next engine
takes the tokens so far for a part of the prompt:

    stop strings   may begin before the loss and end after it, where no engine sees them: looked for here
    grammars       begin with the first new token: the completion starts over, so nothing of it is handed on
                   before its end
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, cast

from slipstream.rollout.engine.client import EngineError, InvalidRequest, RequestRefused
from slipstream.rollout.engine.engine_pool import NoEngine
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.sampling import LiveSampling
from slipstream.rollout.gateway.source import (
    Exhausted,
    Finished,
    Interrupted,
    Rejected,
    TokenDelta,
    TokenRequest,
)
from slipstream.rollout.tokens.tokenizer import Decode
from slipstream.rollout.tokens.trajectory import Finish

RETRY_FULL_S = 1.0
"""Time after which a client should try again when all requests that may run do: one of them ends soon."""

RETRY_ENGINES_S = 5.0
"""Time after which a client should try again when no engine serves: one has to start."""

PIECE = 16
"""Tokens of a delta of a completion that is handed on at its end. SGLang's parsers of tool calls expect a
stream: they report at most one event for each delta."""


class LivePool(Protocol):
    """The part of ``EnginePool`` that serves live requests."""

    @property
    def version(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: LiveSampling,
        completion: GrowingCompletion,
        *,
        grown: Callable[[], None] | None = None,
    ) -> None: ...


class EngineTokens:
    """The ``TokenSource`` of a gateway process. Single event loop."""

    def __init__(self, pool: LivePool, decode: Decode) -> None:
        """``decode``: returns the text of token ids."""
        self._pool = pool
        self._decode = decode
        self._open = 0
        """Number of requests that run or wait for an engine."""

    @property
    def version(self) -> int:
        """Policy version that a new request gets."""
        return self._pool.version

    def retry_after_s(self) -> float | None:
        """Return in how many seconds to try again, if no request can be taken now; None if one can."""
        capacity = self._pool.capacity
        if not capacity:
            return RETRY_ENGINES_S
        return None if self._open < capacity else RETRY_FULL_S

    async def generate(self, request: TokenRequest) -> AsyncGenerator[TokenDelta]:
        """Yield the completion of a request as it grows. Raises Rejected, Exhausted and Interrupted."""
        sampling = _sampling(request)
        if (retry_s := self.retry_after_s()) is not None:
            raise Exhausted("no engine has room for another request", retry_s)
        stops = Stops(sampling, self._decode)
        reader = _Reader(GrowingCompletion(), stops)
        reader.completion.wants_prompt = request.scores_prompt
        generating = asyncio.create_task(
            self._pool.generate(
                request.input_ids,
                sampling,
                reader.completion,
                grown=None if sampling.starts_over else reader.grown,
            ),
            name="live request",
        )
        generating.add_done_callback(lambda _: reader.arrived.set())
        self._open += 1
        try:
            while not generating.done() and not reader.stopped:
                await reader.arrived.wait()
                reader.arrived.clear()
                if not generating.done() and (delta := reader.delta()) is not None:
                    yield delta
            if generating.done():
                _raise_error(generating)
                reader.grown()
            if sampling.starts_over:
                while (delta := reader.delta(PIECE)) is not None:
                    yield delta
            yield reader.last()
        finally:
            self._open -= 1
            generating.cancel()
            await asyncio.wait({generating})


class Stops:
    """The stop strings and expressions of a request, looked for where no engine can see them."""

    def __init__(self, sampling: LiveSampling, decode: Decode) -> None:
        strings = _texts(sampling.parameters.get("stop"))
        self._tests: list[tuple[str, Callable[[str], bool]]] = [
            (text, lambda window, text=text: text in window) for text in strings
        ]
        self._reach = max((len(text.encode()) for text in strings), default=0)
        """Number of tokens on either side of a cut that a match can need: none is shorter than a byte."""
        for expression in _texts(sampling.parameters.get("stop_regex")):
            self._tests.append((expression, lambda window, e=expression: re.search(e, window) is not None))
            self._reach = REACH_OF_EXPRESSIONS
        self._decode = decode

    def across(self, completion: GrowingCompletion) -> tuple[int, str] | None:
        """Return (tokens, match) of the first match that begins before the latest cut and ends after it.

        ``tokens``: number of tokens of the completion up to the end of the match.
        """
        cut, tokens = completion.resumed, completion.tokens
        if not cut or not self._tests:
            return None
        begin = max(0, cut - self._reach)
        for end in range(cut + 1, min(len(tokens), cut + self._reach) + 1):
            window = self._decode(tokens[begin:end].tolist())
            for match, test in self._tests:
                if test(window):
                    return end, match
        return None


REACH_OF_EXPRESSIONS = 256
"""Tokens on either side of a cut in which matches of an expression are looked for: SGLang's longest
expression has as many bytes."""


class _Reader:
    """Remembers how much of a completion has been handed on."""

    def __init__(self, completion: GrowingCompletion, stops: Stops) -> None:
        self.completion = completion
        self.arrived = asyncio.Event()
        self.stopped: tuple[int, str] | None = None
        """(tokens, match) of a stop string that no engine has seen."""
        self._stops = stops
        self._read = 0
        self._is_first = True
        """No delta has been handed on."""
        self._end = 0
        """Number of tokens that may be handed on."""

    def grown(self) -> None:
        """Hand on all tokens that have arrived."""
        if self.stopped is None:
            self.stopped = self._stops.across(self.completion)
            self._end = self.stopped[0] if self.stopped else len(self.completion.tokens)
            self.arrived.set()

    def delta(self, most: int | None = None) -> TokenDelta | None:
        """Return the next tokens, ``most`` of them at the most; None if there are none."""
        end = self._end if most is None else min(self._end, self._read + most)
        return self._until(end) if end > self._read else None

    def last(self) -> TokenDelta:
        """Return the rest, which may be empty, and why the completion ended."""
        completion = self.completion
        if self.stopped is not None:
            return self._until(self._end, Finished(Finish.STOP, self.stopped[1]))
        return self._until(self._end, Finished(completion.finish, completion.matched))

    def _until(self, end: int, finish: Finished | None = None) -> TokenDelta:
        completion, begin = self.completion, self._read
        self._read = end
        is_first, self._is_first = self._is_first, False
        return TokenDelta(
            completion.tokens[begin:end].tolist(),
            completion.logprobs[begin:end].tolist(),
            _first_spans(completion, end),
            completion.alternatives[begin:end],
            completion.cached_tokens,
            finish,
            completion.prompt_logprobs if is_first else (),
            completion.prompt_alternatives if is_first else (),
        )


def _first_spans(completion: GrowingCompletion, end: int) -> list[tuple[int, int]]:
    """Return (version, tokens) of the first ``end`` tokens."""
    spans: list[tuple[int, int]] = []
    begin = 0
    for version, n in completion.spans():
        if begin < end:
            spans.append((version, min(n, end - begin)))
        begin += n
    return spans


def _sampling(request: TokenRequest) -> LiveSampling:
    parameters = dict(request.sampling)
    parameters.pop("n", None)
    max_new_tokens = cast(int, parameters.pop("max_new_tokens"))
    name = f"request {request.id} of the key {request.key}"
    return LiveSampling(max_new_tokens, parameters, request.priority, request.top_logprobs, name)


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        value = [value]
    return [text for text in cast(list[object], value or []) if isinstance(text, str) and text]


def _raise_error(generating: asyncio.Task[None]) -> None:
    """Raise what a request has failed with, as the endpoints know it."""
    try:
        generating.result()
    except (RequestRefused, InvalidRequest) as error:
        raise Rejected(str(error)) from error
    except (EngineError, NoEngine) as error:
        raise Interrupted(str(error)) from error
