"""Tokens for the gateway without engines: the last user message says what is answered.

    #say Hello, world.              the answer, up to the end of the message
    #chunk=3 #say Hello             in deltas of three tokens
    #hold #say Hello                the first delta, and the rest when ``release`` is called
    #reject, #fail                  refused at once; broken off after the first delta

Everything is a function of the prompt, so that a request that is sent again gets the same.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from slipstream.rollout.gateway.source import Finished, Interrupted, Rejected, TokenDelta, TokenRequest
from slipstream.rollout.tokens.trajectory import Finish

USER, END = "<|im_start|>user\n", "<|im_end|>"
DEFAULT = "ok"
VERSIONS = (3, 4)
"""Policy versions of the first and of the second half of every answer."""


class _Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


def logprob(position: int) -> float:
    """Return the log-prob of the token at a position of an answer."""
    return -0.01 - 0.1 * (position % 7)


class ScriptedSource:
    """Follows the script in the prompt."""

    def __init__(self, tokenizer: _Tokenizer, *, delay_s: float = 0.0) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.encode(END)[0]
        self._delay_s = delay_s
        self._released = asyncio.Event()
        self.version = VERSIONS[-1]
        self.full_for_s: float | None = None
        self.requests: list[TokenRequest] = []
        self.cancelled = 0

    def retry_after_s(self) -> float | None:
        return self.full_for_s

    def release(self) -> None:
        """Let all answers go on that stand still, and those that come."""
        self._released.set()

    def hold(self) -> None:
        """Let answers with #hold stand still again."""
        self._released.clear()

    async def generate(self, request: TokenRequest) -> AsyncGenerator[TokenDelta]:
        self.requests.append(request)
        script, answer = self._script(request)
        if "reject" in script:
            raise Rejected("the script rejects it")
        ids = [*self._tokenizer.encode(answer), self._end]
        finish = Finished(Finish.STOP, self._end)
        limit = request.sampling["max_new_tokens"]
        assert isinstance(limit, int)
        if len(ids) > limit:
            ids, finish = ids[:limit], Finished(Finish.LENGTH)
        size = int(script.get("chunk", 4))
        try:
            for start in range(0, max(len(ids), 1), size):
                await asyncio.sleep(self._delay_s)
                end = min(start + size, len(ids))
                yield self._delta(ids, start, end, request, finish if end == len(ids) else None)
                if "fail" in script:
                    raise Interrupted("the script breaks it off")
                if "hold" in script:
                    await self._released.wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise

    def _script(self, request: TokenRequest) -> tuple[dict[str, str], str]:
        prompt = self._tokenizer.decode(list(request.input_ids))
        last = prompt.rpartition(USER)[2].partition(END)[0]
        words, found, answer = last.rpartition("#say ")
        script = dict(re.findall(r"#(\w+)=?(\w*)", words if found else last))
        return script, answer if found else DEFAULT

    def _delta(
        self, ids: list[int], start: int, end: int, request: TokenRequest, finish: Finished | None
    ) -> TokenDelta:
        tops = [
            tuple((logprob(i) - rank, ids[i]) for rank in range(request.top_logprobs))
            for i in range(start, end)
        ]
        first = min(end, len(ids) // 2)
        spans = [(VERSIONS[0], first), (VERSIONS[1], end - first)]
        return TokenDelta(
            ids[start:end],
            [logprob(i) for i in range(start, end)],
            [span for span in spans if span[1]],
            tops if request.top_logprobs else (),
            cached_tokens=0,
            finish=finish,
            **(_scores(request) if request.scores_prompt and not start else {}),
        )


def _scores(request: TokenRequest) -> dict[str, Any]:
    """Return the log-probs of a prompt, and alternatives to its tokens; None and () for the first."""
    logprobs = [logprob(position) for position in range(1, len(request.input_ids))]
    tops = [
        tuple((value - rank, token) for rank in range(request.top_logprobs))
        for value, token in zip(logprobs, request.input_ids[1:], strict=True)
    ]
    return {"prompt_logprobs": [None, *logprobs], "prompt_top_logprobs": [(), *tops]}
