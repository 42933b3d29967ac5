"""The client of one SGLang server (0.5.21): token ids in; token ids, log-probs and version spans out.

Completions are streamed, so that the tokens of a server that is lost are not lost with it. Only this file,
``completion.py`` and ``server_control.py`` know SGLang's request and reply formats.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import cast

import aiohttp

from slipstream.rollout.engine.completion import (
    Aborted,
    CompletionStream,
    Refused,
    TokenScores,
    parse_prompt_logprobs,
    parse_token_scores,
)
from slipstream.rollout.engine.connection import (
    LONGEST_PAUSE_S,
    REQUESTS_FAULT,
    SHORTAGES,
    EngineAddress,
    EngineError,
    EngineLost,
    Malformed,
    RequestRefused,
    is_local,
)
from slipstream.rollout.engine.context import InvalidRequest
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.sampling import LiveSampling, Sampling, request_fields, violations
from slipstream.rollout.engine.server_control import EngineMemory, ServerControl

__all__ = [
    "Aborted",
    "EngineAddress",
    "EngineClient",
    "EngineError",
    "EngineLost",
    "EngineMemory",
    "InvalidRequest",
    "Malformed",
    "RequestRefused",
    "Silent",
]


class Silent(Aborted):
    """A server that is well sent nothing about one completion for too long; the client aborted it."""


ABORT_TIMEOUT_S = 5.0
"""Longest time that is spent on aborting a request whose caller has gone."""


class EngineClient(ServerControl):
    """Everything that one server can be asked: generation here, control calls in the base class.

    Create and use it inside one event loop; ``close`` it at the end.
    """

    def __init__(self, address: EngineAddress) -> None:
        super().__init__(address)
        self._aborting: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for aborting in self._aborting:
            aborting.cancel()
        await super().close()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Sampling,
        completion: GrowingCompletion,
        *,
        greedy: bool = False,
        cache_key: str | None = None,
        version: int,
        grown: Callable[[], None] | None = None,
    ) -> None:
        """Continue ``completion`` of ``input_ids``, up to ``sampling.max_new_tokens``, until its end.

        Requests with different ``cache_key`` share no KV cache. ``version`` is any policy version that the
        engine has had. ``grown`` is called whenever tokens were added and more are to come; the versions of
        these are lower bounds (``completion.py``).

        Raises InvalidRequest, RequestRefused, EngineError, Malformed, EngineLost, Aborted and Silent.
        ``completion`` keeps what has arrived until then. A live request that is cancelled is aborted: SGLang
        notices the end of a connection only when it has something to send.
        """
        ids = [*input_ids, *completion.tokens]
        max_new_tokens = completion.tokens_left(sampling.max_new_tokens)
        self._check(ids, max_new_tokens)
        fields = request_fields(
            sampling,
            done=len(completion.tokens),
            tokens_left=max_new_tokens,
            greedy=greedy,
            stream_interval=self.address.stream_interval,
            scores_prompt=completion.wants_prompt,
        )
        parameters = cast("dict[str, object]", fields["sampling_params"])
        if wrong := violations(parameters, self.address.vocab_size):
            raise InvalidRequest("; ".join(wrong))
        rid = uuid.uuid4().hex
        body: dict[str, object] = {
            "rid": rid,
            "input_ids": ids,
            "return_logprob": True,
            "stream": True,
            "extra_key": cache_key,
            **self._adapter_field,
            **fields,
        }
        if completion.routes_wanted is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": completion.routes_wanted}
        stream = CompletionStream(completion, version, self.address.vocab_size)
        length = len(completion.tokens)
        try:
            async with aclosing(self._chunks(rid, body, stream)) as chunks:
                async for _ in chunks:
                    if grown is not None and len(completion.tokens) > length:
                        length = len(completion.tokens)
                        grown()
        except asyncio.CancelledError:
            if isinstance(sampling, LiveSampling) and not self._session.closed:
                aborting = asyncio.create_task(self._abort_abandoned(rid), name=f"aborting {rid}")
                self._aborting.add(aborting)
                aborting.add_done_callback(self._aborting.discard)
            raise

    async def _abort_abandoned(self, rid: str) -> None:
        with suppress(EngineError, EngineLost, TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self.abort(rid)

    async def _chunks(
        self, rid: str, body: dict[str, object], stream: CompletionStream
    ) -> AsyncGenerator[None]:
        """Add each chunk to ``stream``, and yield after each but the last. Raises as ``generate`` does."""
        self._check_open("/generate")
        try:
            async with self._streamed("/generate", body) as chunks:
                async for chunk in chunks:
                    if stream.add(chunk):
                        return
                    yield
            # A server that goes away ends the stream in the same way as a server that is done.
            raise aiohttp.ClientPayloadError("the stream stopped before its end")
        except TimeoutError as error:
            raise await self._silent(rid) from error
        except (aiohttp.ClientError, OSError) as error:
            if not is_local(error):
                raise self._lost("/generate", error) from error
            SHORTAGES.note(error)
            await asyncio.sleep(LONGEST_PAUSE_S)  # the request is sent again at once
            raise Aborted(f"{self.name} /generate: this process cannot go on reading: {error}") from error
        except Refused as error:
            kind = RequestRefused if error.status in REQUESTS_FAULT else EngineError
            raise kind(f"{self.name} /generate: {error}") from error
        except ValueError as error:
            raise Malformed(f"{self.name} /generate: {error}") from error

    async def _silent(self, rid: str) -> EngineLost | Silent:
        """Abort a completion about which nothing came, and return the error that tells why."""
        message = f"{self.name} /generate: nothing came for {self.address.timeout_s:.0f} s"
        if not await self.healthy():
            return EngineLost(message)
        with suppress(EngineError, EngineLost):
            await self.abort(rid)
        return Silent(message)

    async def prompt_logprobs(self, input_ids: Sequence[int], *, version: int | None = None) -> list[float]:
        """Return the log-probs of input_ids[1:], each given the tokens before it, at temperature 1.

        They are computed without any KV cache of earlier requests. Raises as ``generate`` does, and
        EngineError when the engine's weights are not of ``version``.
        """
        self._check(input_ids, 0)
        reply = await self._post(
            "/generate",
            {
                "input_ids": list(input_ids),
                "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "extra_key": uuid.uuid4().hex,
                **self._adapter_field,
            },
        )
        try:
            return parse_prompt_logprobs(reply, len(input_ids), version)
        except ValueError as error:
            raise EngineError(f"{self.name} /generate: {error}") from error

    async def score_tokens(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, top_k: int = 0
    ) -> TokenScores:
        """Return the log-probs of ``token_ids`` after a prompt, each given all tokens before it, at
        temperature 1. ``top_k``: number of likeliest tokens to report at each place.

        They are computed without any KV cache of earlier requests. Raises as ``generate`` does.
        """
        ids = [*prompt_ids, *token_ids]
        self._check(ids, 0)
        if not prompt_ids or not token_ids:
            raise InvalidRequest("found an empty prompt or no tokens to score, expected both")
        body: dict[str, object] = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            # The log-prob of the first token that is reported is missing: it is the last one of the prompt.
            "logprob_start_len": len(prompt_ids) - 1,
            "extra_key": uuid.uuid4().hex,
            **self._adapter_field,
        }
        if top_k:
            body["top_logprobs_num"] = top_k
        reply = await self._post("/generate", body)
        try:
            return parse_token_scores(reply, token_ids, top_k)
        except ValueError as error:
            raise Malformed(f"{self.name} /generate: {error}") from error

    @property
    def _adapter_field(self) -> dict[str, object]:
        adapter = self.address.adapter
        return {} if adapter is None else {"lora_path": adapter}

    def _check(self, input_ids: Sequence[int], max_new_tokens: int) -> None:
        """Raise InvalidRequest for a request that must not be sent.

        A token id outside the vocabulary would index past the embedding and end the server for everybody.
        """
        vocab_size, max_length = self.address.vocab_size, self.address.max_length
        if not input_ids:
            raise InvalidRequest("input_ids is empty")
        if bad := [i for i in input_ids if not 0 <= i < vocab_size]:
            raise InvalidRequest(f"token ids {bad[:5]} are outside the vocabulary of {vocab_size}")
        if len(input_ids) + max_new_tokens > max_length:
            raise InvalidRequest(
                f"{len(input_ids)} prompt + {max_new_tokens} new tokens exceed the context of {max_length}",
                room=max(0, max_length - len(input_ids)),
            )
