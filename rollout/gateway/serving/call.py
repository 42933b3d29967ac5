"""One request on its way: what it is called, the turns that it begins, and how it is read and recorded.

    arrives ──► begin (once for each prompt) ──► contents ──► SGLang's endpoint ──► record ──► last byte
                  └─ or joins a turn that runs                                         └─ or end: cancelled

Knows neither HTTP nor SGLang's classes, only the form in which SGLang's tokenizer manager hands out answers.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from types import AsyncGeneratorType
from typing import Any, TypeVar, cast

import orjson

from slipstream.configs.schema import LimitsConfig
from slipstream.rollout.gateway.conversations import (
    Arrival,
    ChatMessage,
    EntryLog,
    PromptTooLong,
    Template,
    TooManySessions,
    UnknownTurn,
)
from slipstream.rollout.gateway.serving.client_tools import ClientTools
from slipstream.rollout.gateway.serving.contents import (
    AnswerContents,
    Content,
    Form,
    merged,
    whole,
)
from slipstream.rollout.gateway.serving.limits import Refusal
from slipstream.rollout.gateway.serving.running import AnswerPart, Conversations, RunningAnswer, RunningTurns
from slipstream.rollout.gateway.serving.text import GrowingText
from slipstream.rollout.gateway.serving.words import TOO_LONG, UNKNOWN_RESPONSE
from slipstream.rollout.gateway.serving.workers import KeyTurn, Workers
from slipstream.rollout.gateway.sessions.running import RunningRequest
from slipstream.rollout.gateway.source import Exhausted, Rejected, TokenRequest
from slipstream.rollout.tokens.tokenizer import Tokenizer

TEXT_ONLY = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
"""Sampling parameters that shape the text and never reach an engine."""

MOST_ALTERNATIVES = 20
"""Largest number of alternatives for each token, as OpenAI has it."""

INLINE_CHARACTERS = 32_768
"""Length of a text that is encoded within about ten milliseconds."""

PLAUSIBLE = 10
"""Characters for each token of the context up to which a text may well fit."""

CERTAINLY = 1.25
"""A prompt that is longer than the context by this factor is refused before it is compared with its session,
whose ids of the same text may be others."""

T = TypeVar("T")

FULL_AGAIN_S = 1.0
"""Seconds after which a client may ask again when this process generates all that it may."""


@dataclass(frozen=True)
class SharedParts:
    """The parts that all requests of a process share."""

    turns: RunningTurns
    conversations: Conversations
    tokenizer: Tokenizer
    limits: LimitsConfig
    context: int
    defaults: Mapping[str, object]
    """Sampling parameters that hold where a request says nothing."""
    check_sampling: Callable[[Mapping[str, object]], None]
    """Raises ValueError for parameters that SGLang would refuse."""
    end_tokens: Collection[int]
    """Token ids that may end an answer."""
    contents: AnswerContents
    entries: EntryLog
    workers: Workers
    vocab_size: int
    """Number of token ids of the model, without the rows by which ranks pad its embedding."""
    longest_token: int
    """Largest number of characters that a token stands for, or is taken to."""
    mint: Callable[[], str]
    """Returns an id that nobody can guess and that belongs to this process."""


class LiveCall:
    """One HTTP request."""

    def __init__(
        self,
        shared: SharedParts,
        arrival: Arrival,
        body: Mapping[str, object],
        turn: KeyTurn | None,
        tools: ClientTools | None = None,
    ) -> None:
        """``arrival``: without a prompt. ``body``: as the client has sent it. ``turn``: None: it is short."""
        self.tools = tools or ClientTools()
        self.ignored: list[str] = []
        """Wishes that the endpoint could not grant."""
        self._shared = shared
        self._turn = turn
        self._arrival = arrival
        self.body = body
        self.answers: list[RunningAnswer] = []
        """All answers, in the order of the prompts."""
        self.prompts: list[Arrival] = []
        """All prompts so far."""
        self.messages: Sequence[ChatMessage] = ()
        """What the client has got of each answer; empty: it has not got all of them."""
        self._contents: list[AsyncGeneratorType[Content | list[Content]]] = []
        self.one_by_one = False
        """The answers are parsed while they are streamed."""
        self.id = arrival.request
        self.answer_id = self.id
        """Id of the answer: that of the request that has begun the turn."""
        self.session: str | None = None
        """The session that the request belongs to; None before the request has begun."""
        self.refusal: Refusal | None = None
        """Why it is not answered. SGLang's endpoints make errors of their own of the exception that says so,
        some of them with the status 500; this one counts."""

    # ---- what came before

    async def exchanges(self) -> list[dict[str, Any]]:
        """Return the exchanges that lead to the answer which the request names, the first one first.

        Raises Refusal with 404 if one of them is not kept any more.
        """
        numbers: list[int] = []
        request = self._arrival.previous
        try:
            while request:
                answer = self._shared.conversations.answer_of(self._arrival.user, request)
                if answer is None:
                    raise UnknownTurn(f"the answer to {request} is not kept any more")
                numbers.append(answer.turn)
                request = answer.previous
            turns = await self._shared.entries.turns(numbers[::-1])
        except UnknownTurn as error:
            raise Refusal(
                404, f"previous_response_id: {error}", param="previous_response_id", code=UNKNOWN_RESPONSE
            ) from error
        return [orjson.loads(bytes(turn.exchange)) for turn in turns]

    # ---- prompts

    async def prepared(self, work: Callable[[], T]) -> T:
        """Return what ``work`` makes of the request, in a thread if it may take long. Raises as it does."""
        return work() if self._turn is None else await self._turn.run(work)

    def check_length(self, characters: int) -> None:
        """Raise Refusal if a prompt with so many characters cannot fit into the context."""
        longest, context = self._shared.longest_token, self._shared.context
        if characters > longest * context:
            raise self._too_long(characters // longest, "at least ")

    def measured(
        self, text: str, encode: Callable[[str], list[int]], *, has_answers: bool
    ) -> list[int] | None:
        """Return the ids of a long text; None: it is short enough to be encoded on the event loop.

        ``has_answers``: the text has earlier answers. It probably repeats a conversation, of whose ids most
        are known: then only what is new is encoded. Raises Refusal if it is so much longer than the context
        that no history can make it fit.
        """
        self.check_length(len(text))
        if len(text) <= (PLAUSIBLE * self._shared.context if has_answers else INLINE_CHARACTERS):
            return None
        ids = encode(text)
        if len(ids) > CERTAINLY * self._shared.context:
            raise self._too_long(len(ids))
        return ids

    def prompt(
        self,
        ids: Sequence[int] | None,
        messages: Sequence[ChatMessage] = (),
        text: str | None = None,
        template: Template | None = None,
    ) -> Arrival:
        """Return the request with one of its prompts, as the endpoint has made it. Raises Refusal for a
        token id outside the vocabulary."""
        # Engines index past their embedding with such an id, or, with several ranks, take it for zeros.
        size = self._shared.vocab_size
        if outside := [token for token in ids or () if not 0 <= token < size]:
            raise Refusal(400, f"token id {outside[0]} is outside the vocabulary of {size}")
        return replace(self._arrival, prompt_ids=ids, messages=messages, text=text, template=template)

    def begin(
        self,
        prompt: Arrival,
        sampling: Mapping[str, object],
        *,
        top_logprobs: int = 0,
        scores_prompt: bool = False,
    ) -> None:
        """Begin the turn of a prompt, or join the one that runs already. Raises Refusal."""
        given = {name: value for name, value in sampling.items() if value is not None}
        choices = self._choices(given.pop("n", 1))
        parameters = {**self._shared.defaults, **given}
        if not 0 <= top_logprobs <= MOST_ALTERNATIVES:
            raise Refusal(
                400,
                f"top_logprobs: expected 0 to {MOST_ALTERNATIVES}, found {top_logprobs}",
                param="top_logprobs",
            )
        self._check(prompt, parameters)
        running = self._place(prompt, parameters, choices)
        answers = self._shared.turns.join(running)
        if not answers:
            room = self._shared.context - len(running.input_ids)
            requests = [
                TokenRequest(
                    running.input_ids,
                    _parameters(running.sampling, room, choice),
                    top_logprobs=top_logprobs,
                    scores_prompt=scores_prompt,
                    key=self._arrival.user.name,
                    id=running.request,
                )
                for choice in range(choices)
            ]
            new_answer = partial(self._new_answer, running, parameters)
            answers = self._shared.turns.start(running, requests, new_answer)
        self.answers += answers
        self.prompts.append(prompt)
        self.session = running.session
        self.answer_id = running.request

    def _choices(self, n: object) -> int:
        running = len(self.answers)
        limit = self._shared.limits.choices
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= limit - running:
            raise Refusal(400, f"n: expected a whole number from 1 to {limit} in all, found {n!r}", param="n")
        if self._shared.turns.answers + n > self._shared.limits.concurrent:
            raise Refusal(503, "all places are taken", retry_after_s=FULL_AGAIN_S)
        return n

    def _check(self, prompt: Arrival, parameters: Mapping[str, object]) -> None:
        if not prompt.prompt_ids and not prompt.text:
            raise Refusal(400, "the prompt is empty")
        try:
            self._shared.check_sampling(parameters)
        except (ValueError, TypeError, AttributeError) as error:
            raise Refusal(400, f"sampling parameters: {error}") from error

    def _too_long(self, length: int, bound: str = "") -> Refusal:
        return Refusal(
            400,
            f"the prompt has {bound}{length} tokens, and the model's context ends at {self._shared.context}",
            code=TOO_LONG,
            facts={
                "tokens": length,
                "context": self._shared.context,
                "longest": self._shared.context - 1,  # an answer has a token at least
            },
        )

    def _place(self, prompt: Arrival, parameters: Mapping[str, object], choices: int) -> RunningRequest:
        arrival = replace(
            prompt,
            session=self.session or prompt.session,
            digest=prompt.digest + len(self.prompts).to_bytes(2),
            sampling={name: value for name, value in parameters.items() if name not in TEXT_ONLY},
            choices=choices,
            most_tokens=self._shared.context - 1,
        )
        try:
            return self._shared.conversations.begin(arrival)
        except PromptTooLong as error:
            raise self._too_long(error.tokens) from error
        except ValueError as error:
            raise Refusal(400, str(error)) from error
        except TooManySessions as error:
            raise Refusal(
                429, str(error), retry_after_s=error.retry_after_s, facts={"unit": "sessions"}
            ) from error

    def _new_answer(
        self, running: RunningRequest, parameters: Mapping[str, object], choice: int
    ) -> RunningAnswer:
        tokenizer = self._shared.tokenizer
        skip = bool(parameters.get("skip_special_tokens", True))
        spaces = bool(parameters.get("spaces_between_special_tokens", True))
        keeps_stop = bool(parameters.get("no_stop_trim", False))

        def decode(ids: Sequence[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=skip, spaces_between_special_tokens=spaces)

        stops = parameters.get("stop") or []
        text = GrowingText(
            decode,
            stops=[stops] if isinstance(stops, str) else list(stops),  # pyright: ignore[reportArgumentType]
            keep_stop=keeps_stop,
            whole_pairs=self.one_by_one,
        )
        return RunningAnswer(
            running,
            choice,
            text,
            keeps_end_token=keeps_stop,
            end_tokens=self._shared.end_tokens,
            one_by_one=self.one_by_one,
        )

    # ---- answers

    @property
    def tokens(self) -> int:
        """Number of tokens of all prompts and answers so far."""
        prompts = {id(answer.request): len(answer.request.input_ids) for answer in self.answers}
        return sum(prompts.values()) + sum(len(answer.tokens) for answer in self.answers)

    @property
    def input_ids(self) -> Sequence[int]:
        """The ids of the first prompt."""
        return self.answers[0].request.input_ids

    async def started(self) -> None:
        """Wait for the first tokens. Raises Refusal if there will be none."""
        try:
            for answer in self.answers[:1]:
                await answer.started()
        except Exception as error:
            raise self._refuse(error) from error

    def contents(self, form: Form) -> AsyncGeneratorType[Content | list[Content]]:
        """Yield the answers in SGLang's form: all at the end, or each part with its ``index`` as it comes.

        Raises ValueError, with which SGLang's endpoints refuse a request; ``refusal`` says more. Only ``end``
        closes the generator: SGLang's generators do not close those that they read.
        """
        contents = cast("AsyncGeneratorType[Content | list[Content]]", self._read(form))
        self._contents.append(contents)
        return contents

    async def _read(self, form: Form) -> AsyncGenerator[Content | list[Content]]:
        if form.stream:
            parts = [self._parts(index, form) for index in range(len(self.answers))]
            async with aclosing(merged(parts)) as contents:
                async for part in contents:
                    yield part
            return
        wholes: list[Content] = []
        for answer in self.answers:
            try:
                await answer.ended()
            except Exception as error:
                raise ValueError(self._refuse(error).message) from error
            wholes.append(self._shared.contents.of(answer, form, 0, whole(answer)))
        yield wholes if len(wholes) > 1 else wholes[0]

    async def _parts(self, index: int, form: Form) -> AsyncGenerator[Content]:
        answer = self.answers[index]
        known = 0
        try:
            async with aclosing(answer.read()) as steps:
                async for step in steps:
                    yield self._shared.contents.of(answer, form, known, step) | {"index": index}
                    known = step.tokens
        except Exception as error:
            refusal = self._refuse(error)
            if not known:
                raise ValueError(refusal.message) from error
            reason = {"type": "abort", "message": refusal.message, "status_code": HTTPStatus(refusal.status)}
            content: Content = {
                **self._shared.contents.of(answer, form, known, AnswerPart("", known, None)),
                "index": index,
            }
            content["meta_info"]["finish_reason"] = reason
            yield content

    def _refuse(self, error: Exception) -> Refusal:
        if isinstance(error, Rejected):
            self.refusal = Refusal(400, str(error))
        elif isinstance(error, Exhausted):
            self.refusal = Refusal(503, str(error), retry_after_s=error.retry_after_s)
        else:
            self.refusal = Refusal(503, "the answer cannot be finished", retry_after_s=FULL_AGAIN_S)
        return self.refusal

    # ---- the end

    async def record(self, messages: Sequence[ChatMessage], exchange: bytes = b"") -> None:
        """Record all answers with the messages that the client has got, and wait until they are durable.

        Answers that have failed are left out, and end as cancelled. ``exchange``: JSON by which a later
        request that names the answer knows what came before; empty: none can name it.
        """
        self.messages = messages
        await asyncio.gather(
            *(
                self._shared.turns.record(answer, message, exchange)
                for answer, message in zip(self.answers, messages, strict=True)
                if answer.finish is not None
            )
        )

    def abort(self) -> int:
        """End all answers where they are. Return the number of those that had not ended."""
        return sum(map(self._shared.turns.abort, self.answers))

    async def end(self) -> None:
        """Leave all answers: what is neither finished nor read by another request is cancelled.

        A task that reads contents at this moment gets their failure, unless another request reads on.
        """
        try:
            for contents in self._contents:
                if not contents.ag_running:  # Python refuses to close it then
                    await contents.aclose()
        finally:
            answers, self.answers = self.answers, []
            self._shared.turns.leave(answers)


def _parameters(sampling: Mapping[str, object], room: int, choice: int) -> dict[str, object]:
    """Return the sampling parameters of one of several answers, for which ``room`` tokens are left."""
    parameters = dict(sampling)
    limit = parameters.get("max_new_tokens")
    length = parameters["max_new_tokens"] = min(limit, room) if isinstance(limit, int) else room
    if isinstance(least := parameters.get("min_new_tokens"), int):
        parameters["min_new_tokens"] = min(least, length)
    seed = parameters.get("sampling_seed")
    if isinstance(seed, int) and choice:
        parameters["sampling_seed"] = seed + choice  # else all answers would be the same
    return parameters
