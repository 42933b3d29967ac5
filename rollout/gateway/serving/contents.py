"""Answers in the form in which SGLang's tokenizer manager yields them. Pure, except ``merged``."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from slipstream.rollout.engine.growing import Alternatives
from slipstream.rollout.gateway.serving.running import AnswerPart, RunningAnswer
from slipstream.rollout.gateway.source import Finished
from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.tokens.trajectory import Finish

Content = dict[str, Any]
"""A part of an answer as SGLang's tokenizer manager yields it: ``text``, ``output_ids`` and ``meta_info``."""


@dataclass(frozen=True)
class Form:
    """How SGLang's endpoint wants the answers."""

    id: str
    stream: bool
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_ids: bool = False
    thought_end: int | None = None
    """Token id that ends the reasoning; None: there is no reasoning to be counted."""

    def reasoning_tokens(self, answer: RunningAnswer) -> int:
        if self.thought_end is None:
            return 0
        try:
            return answer.tokens.index(self.thought_end) + 1
        except ValueError:
            return len(answer.tokens)


class AnswerContents:
    """Makes the contents of a process's answers."""

    def __init__(self, tokenizer: Tokenizer, version: Callable[[], int]) -> None:
        """``version``: returns the policy version that a new request gets."""
        self._tokenizer = tokenizer
        self._version = version

    def of(self, answer: RunningAnswer, form: Form, known: int, step: AnswerPart) -> Content:
        """Return the part of an answer between ``known`` tokens and those of ``step``."""
        meta: dict[str, object] = {
            "id": form.id,
            "finish_reason": None if step.finish is None else _finish_reason(step),
            "prompt_tokens": len(answer.request.input_ids),
            "completion_tokens": step.tokens,
            "reasoning_tokens": form.reasoning_tokens(answer) if step.finish else 0,
            "cached_tokens": answer.cached_tokens,
            "weight_version": str(answer.spans[-1][0] if answer.spans else self._version()),
        }
        if step.finish is not None:
            meta["weight_versions"] = _version_spans(answer.spans)
        new = slice(known, step.tokens)
        if form.logprobs:
            meta |= {
                "output_token_logprobs": [
                    (logprob, token, self._shown(token))
                    for logprob, token in zip(answer.logprobs[new], answer.tokens[new], strict=True)
                ],
                "output_token_logprobs_length": step.tokens,
                "input_token_logprobs": [],
            }
        if form.top_logprobs:
            meta["output_top_logprobs"] = self._shown_rows(answer.top_logprobs[new])
        if answer.prompt_logprobs and not known:
            meta["input_token_logprobs"] = [
                (logprob, token, self._shown(token))
                for logprob, token in zip(answer.prompt_logprobs, answer.request.input_ids, strict=True)
            ]
            meta["input_top_logprobs"] = self._shown_rows(answer.prompt_top_logprobs)
        content: Content = {"text": step.text, "output_ids": answer.tokens[new], "meta_info": meta}
        if form.prompt_ids:
            content["prompt_token_ids"] = list(answer.request.input_ids)
        return content

    def _shown_rows(self, rows: Sequence[Alternatives]) -> list[list[tuple[float, int, str]] | None]:
        return [[(logprob, token, self._shown(token)) for logprob, token in row] or None for row in rows]

    def _shown(self, token: int) -> str:
        return self._tokenizer.decode([token])


def whole(answer: RunningAnswer) -> AnswerPart:
    """Return all that an answer has so far as one part."""
    return AnswerPart(answer.text, len(answer.tokens), answer.finish)


def _finish_reason(step: AnswerPart) -> dict[str, object]:
    finish = step.finish
    assert isinstance(finish, Finished)
    if finish.finish is Finish.LENGTH:
        return {"type": "length", "length": step.tokens}
    if finish.finish is Finish.PARTIAL:
        return {"type": "abort", "message": "aborted by its client"}
    return {"type": "stop", "matched": finish.matched}


def _version_spans(spans: Sequence[tuple[int, int]]) -> list[dict[str, object]]:
    listed: list[dict[str, object]] = []
    start = 0
    for version, tokens in spans:
        listed.append({"version": str(version), "start": start, "end": start + tokens})
        start += tokens
    return listed


async def merged(parts: Sequence[AsyncGenerator[Content]]) -> AsyncGenerator[Content]:
    """Yield what several generators yield, each as soon as it comes."""
    if len(parts) == 1:
        async with aclosing(parts[0]) as only:
            async for part in only:
                yield part
        return
    waiting = {asyncio.ensure_future(_next(generator)): generator for generator in parts}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                generator = waiting.pop(task)
                part = task.result()
                if part is not None:
                    yield part
                    waiting[asyncio.ensure_future(_next(generator))] = generator
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for generator in parts:
            await generator.aclose()


async def _next(generator: AsyncIterator[Content]) -> Content | None:
    return await anext(generator, None)
