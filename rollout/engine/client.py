"""The HTTP client of one SGLang server: token ids in; token ids, log-probs and version spans out.

The one place that knows SGLang's request and answer formats (0.5.21). The control calls are the
``EngineEndpoint`` that ``bridge.publish`` drives.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import aiohttp

from configs.schema import SamplingConfig
from rollout.trajectory import Completion, Finish, Span

T = TypeVar("T")


class EngineError(RuntimeError):
    """The server refused a request, or gave an answer that is none; the message is the server's own."""


class EngineLost(ConnectionError):
    """The server is gone or does not answer; another server may be asked for the same thing."""


class Aborted(RuntimeError):
    """The server gave this one answer up; it may be asked again."""


class InvalidRequest(ValueError):
    """A request that must not be sent: it would stop the server, or could not be answered."""


def parse_completion(answer: Mapping[str, Any]) -> Completion:
    """One answer of /generate. Raises Aborted for one that was given up, ValueError for a malformed one."""
    try:
        meta = _finished(answer)
        logprobs, tokens = [], []
        for logprob, token, *_ in meta["output_token_logprobs"]:
            logprobs.append(float(logprob))
            tokens.append(int(token))
        if tokens != list(answer["output_ids"]):
            raise ValueError("the token ids of the log-probs differ from output_ids")
        # SGLang gives an output without tokens one empty span.
        spans = tuple(
            Span(int(s["version"]), int(s["start"]), int(s["end"]))
            for s in meta["weight_versions"]
            if s["end"] != s["start"]
        )
        return Completion(
            tuple(tokens),
            tuple(logprobs),
            spans,
            Finish(meta["finish_reason"]["type"]),
            int(meta.get("num_retractions") or 0),
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not an answer of /generate: {type(error).__name__}: {error}") from error


def parse_prompt_logprobs(answer: Mapping[str, Any], length: int) -> list[float]:
    """The log-probs of all but the first of ``length`` prompt tokens. Raises as ``parse_completion`` does."""
    try:
        _first, *rest = _finished(answer)["input_token_logprobs"]
        logprobs = [float(logprob) for logprob, *_ in rest]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not an answer of /generate: {type(error).__name__}: {error}") from error
    if len(logprobs) != length - 1:
        raise ValueError(f"log-probs of {len(logprobs) + 1} prompt tokens, expected {length}")
    return logprobs


def _finished(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = answer["meta_info"]
    if meta["finish_reason"]["type"] == "abort":
        raise Aborted(f"generation was aborted: {meta['finish_reason'].get('message', '')}")
    return meta


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
    """Longest wait for any one answer."""


class EngineClient:
    """One server. Create and use it inside one event loop; ``close`` it at the end."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.name = address.name
        self.ranks = address.ranks
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
        await self._session.close()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        greedy: bool = False,
        cache_key: str | None = None,
    ) -> Completion:
        """Continue ``input_ids``. ``cache_key`` keeps requests with another key out of this one's KV prefix.

        Raises InvalidRequest, EngineError, EngineLost, Aborted.
        """
        self._check(input_ids, sampling.max_new_tokens)
        return await self._generate(
            parse_completion,
            {
                "input_ids": list(input_ids),
                "sampling_params": {
                    "temperature": 0.0 if greedy else sampling.temperature,
                    "top_p": sampling.top_p,
                    "top_k": sampling.top_k,
                    "max_new_tokens": sampling.max_new_tokens,
                },
                "return_logprob": True,
                "extra_key": cache_key,
            },
        )

    async def prompt_logprobs(self, input_ids: Sequence[int]) -> list[float]:
        """Log-probs of input_ids[1:] given what precedes them, at temperature 1. Raises like ``generate``."""
        self._check(input_ids, 0)
        return await self._generate(
            partial(parse_prompt_logprobs, length=len(input_ids)),
            {
                "input_ids": list(input_ids),
                "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            },
        )

    async def _generate(self, parse: Callable[[Any], T], body: Mapping[str, Any]) -> T:
        answer = await self._post("/generate", body)
        try:
            return parse(answer)
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
        """``retract`` or ``in_place``. SGLang's own default would abort the running requests."""
        await self._post("/pause_generation", {"mode": mode})

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"abort_all": True})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

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

    async def version(self) -> int:
        """The policy version that the server says it has."""
        answer = await self._request("GET", "/model_info", None)
        return int(answer["weight_version"])

    async def healthy(self) -> bool:
        try:
            await self._request("GET", "/health", None)
        except (EngineError, EngineLost):
            return False
        return True

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        if self._session.closed:
            raise EngineLost(f"{self.name} {path}: the engine has been given up")
        try:
            async with self._session.request(method, path, json=body) as response:
                text = await response.text()
        except TimeoutError as error:
            raise EngineLost(f"{self.name} {path}: no answer in {self.address.timeout_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLost(f"{self.name} {path}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise EngineError(f"{self.name} {path}: HTTP {response.status}: {text[:500]}")
        try:
            answer = json.loads(text) if text.startswith(("{", "[")) else text
        except ValueError as error:
            raise EngineError(f"{self.name} {path}: not JSON: {error}: {text[:500]}") from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{self.name} {path}: {answer.get('message', answer)}")
        return answer
