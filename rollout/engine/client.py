"""The HTTP client of one SGLang server: token ids in; token ids, log-probs and version spans out.

Answers are streamed, so that what a server has generated is not lost with it. This file and ``answer`` are
the only ones that know SGLang's request and answer formats (0.5.21). The control calls are the
``EngineEndpoint`` that ``slipstream.bridge.publish`` drives.
"""

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import aiohttp

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.control.concurrency import EngineLoad
from slipstream.rollout.engine.answer import Aborted, Answer, events, parse_load, parse_prompt_logprobs
from slipstream.rollout.trajectory import Completion

EngineMemory = Literal["weights", "kv_cache", "cuda_graph"]
"""What a server can give up apart from the others, by SGLang's names."""

REPLICA = "/slipstream/replica"
"""What ``slipstream.bridge.transport.replica`` adds to a server."""

HEALTH_TIMEOUT_S = 20.0
"""A server that takes longer than this to say that it is there does not serve either."""


class EngineError(RuntimeError):
    """The server refused a request, or gave an answer that is none; the message is the server's own."""


class EngineLost(ConnectionError):
    """The server is gone or does not answer; another server may be asked for the same thing."""

    def __init__(self, message: str, partial: Completion | None = None) -> None:
        super().__init__(message)
        self.partial = partial
        """What had arrived of an answer by then; None if nothing had."""


class Silent(Aborted):
    """A server that is well sent nothing of this answer for too long, and was told to give it up."""


class InvalidRequest(ValueError):
    """A request that must not be sent: it would stop the server, or could not be answered."""


@dataclass(frozen=True)
class EngineAddress:
    """Where a server is and what may be asked of it. Plain data, so that it can travel between processes."""

    name: str
    url: str
    ranks: int
    vocab_size: int
    max_length: int
    """Longest prompt plus answer, in tokens."""
    timeout_s: float
    """Longest silence: nothing of an answer arrives for this long. A server is silent about a request while
    it is paused for an update or has the request in its queue, so those times have to fit in."""
    stream_interval: int = 64
    """Tokens from one chunk of an answer to the next."""


class EngineClient:
    """One server. Create and use it inside one event loop; ``close`` it at the end."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.name = address.name
        self.ranks = address.ranks
        self._streams: set[aiohttp.ClientResponse] = set()
        self._session = aiohttp.ClientSession(
            base_url=address.url,
            timeout=aiohttp.ClientTimeout(total=address.timeout_s),
            # A kept connection may be one that the idle server is just closing; a POST on it would look like
            # the loss of the engine.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End what is running: every request that waits for an answer raises EngineLost."""
        # Closing the session alone leaves those waiting for ever that are in the middle of an answer.
        for response in self._streams:
            response.close()
        await self._session.close()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        greedy: bool = False,
        cache_key: str | None = None,
        version: int,
        progress: Callable[[Completion], None] | None = None,
    ) -> Completion:
        """Continue ``input_ids``. ``cache_key`` keeps requests with another key out of this one's KV prefix.

        ``version`` is one that the engine has had already; ``progress`` is called with the answer so far
        whenever there is more of it. See ``Answer`` for the versions in there.

        Raises InvalidRequest and EngineError; EngineLost, Aborted and Silent, with the answer so far.
        """
        self._check(input_ids, sampling.max_new_tokens)
        rid = uuid.uuid4().hex
        body = {
            "rid": rid,
            "input_ids": list(input_ids),
            "sampling_params": {
                "temperature": 0.0 if greedy else sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_new_tokens": sampling.max_new_tokens,
                "stream_interval": self.address.stream_interval,
            },
            "return_logprob": True,
            "stream": True,
            "extra_key": cache_key,
        }
        answer = Answer(version)
        async with aclosing(self._ends(body, answer)) as ends:
            while (end := await anext(ends)) is None:
                if progress is not None and (partial := answer.partial) is not None:
                    progress(partial)
            return end

    async def _ends(self, body: Mapping[str, Any], answer: Answer) -> AsyncGenerator[Completion | None]:
        """Feed ``answer`` and tell of every chunk what ``Answer.add`` tells. Raises as ``generate`` does."""
        self._check_open("/generate")
        timeout_s = self.address.timeout_s
        silence = aiohttp.ClientTimeout(sock_connect=timeout_s, sock_read=timeout_s)
        try:
            async with self._session.post("/generate", json=body, timeout=silence) as response:
                if response.status != 200:
                    raise self._refusal("/generate", response.status, await response.text())
                self._streams.add(response)
                try:
                    async for chunk in events(response.content.iter_any()):
                        yield answer.add(chunk)
                finally:
                    self._streams.discard(response)
            # A server that goes away ends the stream as one does that is done.
            raise aiohttp.ClientPayloadError("the answer stopped before its end")
        except TimeoutError as error:
            raise await self._silent(body["rid"], answer.partial) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost("/generate", error, answer.partial) from error
        except ValueError as error:
            raise EngineError(f"{self.name} /generate: {error}") from error

    async def _silent(self, rid: str, partial: Completion | None) -> EngineLost | Silent:
        """What the silence of an answer means. The request is given up in any case."""
        what = f"{self.name} /generate: nothing came for {self.address.timeout_s:.0f} s"
        if not await self.healthy():
            return EngineLost(what, partial)
        with suppress(EngineError, EngineLost):
            await self.abort(rid)
        return Silent(what, partial)

    async def prompt_logprobs(self, input_ids: Sequence[int], *, version: int | None = None) -> list[float]:
        """Log-probs of input_ids[1:] given what precedes them, at temperature 1.

        No KV of before is used for them. Raises like ``generate``, and EngineError when the engine's weights
        are not ``version``.
        """
        self._check(input_ids, 0)
        answer = await self._post(
            "/generate",
            {
                "input_ids": list(input_ids),
                "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "extra_key": uuid.uuid4().hex,
            },
        )
        try:
            return parse_prompt_logprobs(answer, len(input_ids), version)
        except ValueError as error:
            raise EngineError(f"{self.name} /generate: {error}") from error

    def _check(self, input_ids: Sequence[int], max_new_tokens: int) -> None:
        """An id outside the vocabulary indexes past the embedding and ends the server for everybody."""
        vocab_size, max_length = self.address.vocab_size, self.address.max_length
        if not input_ids:
            raise InvalidRequest("input_ids is empty")
        if bad := [i for i in input_ids if not 0 <= i < vocab_size]:
            raise InvalidRequest(f"token ids {bad[:5]} are outside the vocabulary of {vocab_size}")
        if len(input_ids) + max_new_tokens > max_length:
            raise InvalidRequest(
                f"{len(input_ids)} prompt + {max_new_tokens} new tokens exceed the context of {max_length}"
            )

    async def join_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str
    ) -> None:
        await self._post(
            "/init_weights_update_group",
            {
                "master_address": address,
                "master_port": port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": group,
                "backend": backend,
            },
        )

    async def leave_group(self, group: str) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": group})

    async def pause(self, mode: str) -> None:
        """``retract``, ``in_place`` or ``abort``; new requests wait until ``resume``.

        ``abort`` returns when nothing runs any more, which SGLang looks for once a second.
        """
        await self._post("/pause_generation", {"mode": mode})

    async def abort(self, rid: str) -> None:
        """Give up one request. Does nothing when there is none of that name."""
        await self._post("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"abort_all": True})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def release_memory(self, parts: Sequence[EngineMemory]) -> None:
        """Give the GPU memory of ``parts`` to others. The engine must be paused, and not in place."""
        await self._post("/release_memory_occupation", {"tags": list(parts)})

    async def regain_memory(self, parts: Sequence[EngineMemory]) -> None:
        """Take it back: weights as they were, the rest empty. SGLang ends when ``parts`` are not away."""
        await self._post("/resume_memory_occupation", {"tags": list(parts)})

    async def begin_update(self) -> None:
        await self._post("/begin_weight_update", {})

    async def end_update(self) -> None:
        await self._post("/end_weight_update", {})

    async def receive(
        self,
        *,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtype: str,
        group: str,
        flush_cache: bool,
        version: int | None,
    ) -> None:
        """Take one flat bucket from the broadcast that is under way in ``group``."""
        await self._post(
            "/update_weights_from_distributed",
            {
                "names": list(names),
                "dtypes": [dtype] * len(names),
                "shapes": [list(shape) for shape in shapes],
                "group_name": group,
                "load_format": "flattened_bucket",
                "flush_cache": flush_cache,
                "weight_version": None if version is None else str(version),
            },
        )

    async def take(self, handles: Sequence[bytes], *, flush_cache: bool, version: int | None) -> None:
        """Take a flat bucket from shared memory; ``handles``: one for each rank."""
        await self._post(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": [base64.b64encode(handle).decode() for handle in handles],
                "load_format": "flattened_bucket",
                "flush_cache": flush_cache,
                "weight_version": None if version is None else str(version),
            },
        )

    async def load_files(self, folder: Path, *, flush_cache: bool, version: int) -> None:
        """Take all weights from a checkpoint that the server can read."""
        await self._post(
            "/update_weights_from_disk",
            {"model_path": str(folder), "flush_cache": flush_cache, "weight_version": str(version)},
        )

    async def replica_version(self) -> int | None:
        """The version of the weights that are kept beside the server; None when they are incomplete."""
        return (await self._request("GET", REPLICA, None))["version"]

    async def replica_begin(self, files: bytes) -> None:
        await self._request("POST", f"{REPLICA}/begin", files)

    async def replica_patch(self, number: int, patch: bytes) -> None:
        await self._request("POST", f"{REPLICA}/patch/{number}", patch)

    async def replica_commit(self, version: int) -> None:
        await self._request("POST", f"{REPLICA}/commit/{version}", b"")

    async def load_replica(self, *, flush_cache: bool, version: int) -> None:
        """Take all weights from what is kept beside the server."""
        folder = (await self._request("GET", REPLICA, None))["folder"]
        await self.load_files(Path(folder), flush_cache=flush_cache, version=version)

    async def checksum(self) -> str:
        """Of the weights in memory: the same on engines that hold the same on as many ranks."""
        answer = await self._post("/weights_checker", {"action": "checksum"})
        try:
            return str(answer["per_engine_checksum"])
        except LookupError as error:
            raise EngineError(f"{self.name} /weights_checker: no checksum in {answer}") from error

    async def version(self) -> int:
        """The policy version that the server says it has."""
        answer = await self._request("GET", "/model_info", None)
        return int(answer["weight_version"])

    async def load(self) -> EngineLoad:
        """How busy the server was when it last looked: at most 15 decoding steps ago, unless it is paused."""
        answer = await self._request("GET", "/v1/loads?include=core,queues", None)
        try:
            return parse_load(answer)
        except ValueError as error:
            raise EngineError(f"{self.name} /v1/loads: {error}") from error

    async def healthy(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self._request("GET", "/health", None)
        except (EngineError, EngineLost, TimeoutError):
            return False
        return True

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | bytes | None) -> Any:
        self._check_open(path)
        content = {"data": body} if isinstance(body, bytes) else {"json": body}
        try:
            async with self._session.request(method, path, **content) as response:
                text = await response.text()
        except TimeoutError as error:
            raise EngineLost(f"{self.name} {path}: no answer in {self.address.timeout_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, error) from error
        if response.status != 200:
            raise self._refusal(path, response.status, text)
        try:
            answer = json.loads(text) if text.startswith(("{", "[")) else text
        except ValueError as error:
            raise EngineError(f"{self.name} {path}: not JSON: {error}: {text[:500]}") from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{self.name} {path}: {answer.get('message', answer)}")
        return answer

    def _check_open(self, path: str) -> None:
        if self._session.closed:
            raise EngineLost(f"{self.name} {path}: the engine has been given up")

    def _lost(self, path: str, error: Exception, partial: Completion | None = None) -> EngineLost:
        return EngineLost(f"{self.name} {path}: {type(error).__name__}: {error}", partial)

    def _refusal(self, path: str, status: int, text: str) -> EngineError:
        return EngineError(f"{self.name} {path}: HTTP {status}: {text[:500]}")
