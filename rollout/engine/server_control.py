"""The control calls of one SGLang server (0.5.21): pauses, weights, memory, and questions about its state.

``EngineClient`` inherits them, and so is the ``EngineEndpoint`` that the bridge publishes to.
"""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict, cast

from slipstream.rollout.control.concurrency import EngineLoad
from slipstream.rollout.engine.adapters import adapter_name, leftover_adapters
from slipstream.rollout.engine.connection import (
    EngineConnection,
    EngineError,
    EngineLost,
    NotSent,
    RequestRefused,
)
from slipstream.rollout.engine.launch import FACTS

EngineMemory = Literal["weights", "kv_cache", "cuda_graph"]
"""A part of a server's GPU memory that can be released by itself, by SGLang's name."""

REPLICA = "/slipstream/replica"
"""Route that ``bridge/transport/replica.py`` adds to a server."""


class _Replica(TypedDict):
    folder: str
    version: int | None


class _Queues(TypedDict):
    retracted: int


class _RankLoad(TypedDict):
    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float
    timestamp: float
    queues: _Queues


class _Loads(TypedDict):
    loads: list[_RankLoad]


IDLE_S = 10.0
"""Time within which an engine has taken aborted requests out of all of its queues, in seconds."""

NO_MEMORY = "none"
"""A tag of SGLang's memory that is the tag of none."""


class ServerControl(EngineConnection):
    """Every call raises EngineError when the server refuses it, EngineLost when the server does not reply."""

    async def respond(self) -> None:
        """Return when every scheduler of the server has answered."""
        await self._get("/server_info")

    async def pause(self, mode: str) -> None:
        """Stop generating with ``retract``, ``in_place`` or ``abort``; new requests wait until ``resume``.

        ``abort`` returns when nothing runs any more, which SGLang checks once a second. But for ``in_place``,
        the KV cache is empty then, and no request is in a state in which SGLang's scheduler would end at an
        update of the weights or at a release of memory. ``retract`` cannot do that with a request whose
        grammar is still compiled: all requests are aborted then, and their senders ask again.
        """
        await self._post("/pause_generation", {"mode": mode})
        if mode == "retract" and not await self._emptied():
            await self.resume()  # while it is paused, the scheduler takes no request off the grammars' queue
            await self._post("/pause_generation", {"mode": "abort"})
            mode = "abort"
        if mode == "abort" and not await self._emptied(wait_s=IDLE_S):
            raise EngineError(f"{self.name}: requests are left {IDLE_S:g} s after all of them were aborted")

    async def _emptied(self, *, wait_s: float = 0.0) -> bool:
        """Empty the KV cache as soon as no request holds any of it. Return False if some do after ``wait_s``.

        This is asked before an update, and not with it: SGLang's scheduler ends when it cannot do it then.
        """
        try:
            await self._post(f"/flush_cache?timeout={wait_s:g}", {})
        except RequestRefused:
            return False
        return True

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def abort(self, rid: str) -> None:
        """Abort the request with this id, if there is one."""
        await self._post("/abort_request", {"rid": rid})

    async def release_memory(self, parts: Sequence[EngineMemory]) -> None:
        """Release GPU memory. The server must be paused, but not ``in_place``."""
        # SGLang waits for its GPU only after it has released, while kernels of the pause may still read the
        # KV cache: "illegal memory access". A tag that no memory has makes it wait, and do nothing else.
        await self._post("/release_memory_occupation", {"tags": [NO_MEMORY]})
        await self._post("/resume_memory_occupation", {"tags": [NO_MEMORY]})
        await self._post("/release_memory_occupation", {"tags": list(parts)})

    async def regain_memory(self, parts: Sequence[EngineMemory]) -> None:
        """Take released GPU memory back: the weights as they were, the rest empty.

        SGLang ends when ``parts`` have not been released.
        """
        await self._post("/resume_memory_occupation", {"tags": list(parts)})

    # ---- weights

    async def begin_update(self) -> None:
        await self._post("/begin_weight_update", {})

    async def end_update(self) -> None:
        await self._post("/end_weight_update", {})

    async def take(self, handles: Sequence[bytes], *, load_format: str, version: int | None) -> None:
        """Give each rank what its weight loader, ``load_format``, is to work with."""
        await self._post(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": [base64.b64encode(handle).decode() for handle in handles],
                "load_format": load_format,
                "flush_cache": False,
                "weight_version": None if version is None else str(version),
            },
        )

    async def load_files(self, folder: Path, *, version: int) -> None:
        """Load all weights from a checkpoint that the server can read."""
        await self._post(
            "/update_weights_from_disk",
            {"model_path": str(folder), "flush_cache": False, "weight_version": str(version)},
        )

    async def load_adapter(self, version: int, config: Mapping[str, object], tensors: bytes) -> None:
        """Load the adapter of ``version`` beside the one that the server serves, and unload any other.

        No request uses others: those that did were cut off before the served one took their place.
        """
        served, name = await self.weight_version(), adapter_name(version)
        loaded = await self._adapters()
        for other in leftover_adapters(loaded, served):
            await self._unload(other)
        if served == version and name in loaded:
            await self._unload(name)
        await self._post(
            "/load_lora_adapter_from_tensors",
            {
                "lora_name": name,
                "config_dict": dict(config),
                "serialized_named_tensors": [base64.b64encode(tensors).decode()] * self.ranks,
                "load_format": "flattened_bucket",
            },
        )

    async def serve_adapter(self, version: int) -> None:
        """Make requests that start from now on use ``version`` and its adapter.

        No request may run: its tokens would be taken for ones of ``version``.
        """
        await self.rename_version(version)

    async def _adapters(self) -> list[str]:
        """Return the names of all adapters that the server has loaded."""
        reply = cast("dict[str, list[dict[str, object]]]", await self._get("/v1/models"))
        try:
            return [str(model["id"]) for model in reply["data"] if model.get("parent") is not None]
        except (LookupError, TypeError, AttributeError) as error:
            raise EngineError(f"{self.name} /v1/models: no models in {reply}") from error

    async def _unload(self, adapter: str) -> None:
        """Unload an adapter that no request uses."""
        await self._post("/unload_lora_adapter", {"lora_name": adapter})

    async def rename_version(self, version: int) -> None:
        """Label tokens that are sampled from now on with ``version``. The weights stay the same."""
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    # ---- the replica: a copy of the weights beside the server

    async def replica_version(self) -> int | None:
        """Return the version of the replica; None when it is incomplete."""
        return cast(_Replica, await self._get(REPLICA))["version"]

    async def replica_begin(self, files: bytes) -> None:
        await self._request("POST", f"{REPLICA}/begin", files)

    async def replica_patch(self, number: int, patch: bytes) -> None:
        await self._request("POST", f"{REPLICA}/patch/{number}", patch)

    async def replica_commit(self, version: int) -> None:
        await self._request("POST", f"{REPLICA}/commit/{version}", b"")

    async def load_replica(self, *, version: int) -> None:
        """Load all weights from the replica, if it still holds ``version`` as it was committed."""
        checked = cast(_Replica, await self._request("POST", f"{REPLICA}/check/{version}", b""))
        await self.load_files(Path(checked["folder"]), version=version)

    # ---- state

    async def facts(self) -> dict[str, str]:
        """Return what the server says of itself (``launch.FACTS``)."""
        reply = await self._get(FACTS)
        if not isinstance(reply, dict):
            raise EngineError(f"{self.name} {FACTS}: no facts in {reply}")
        return {str(name): str(value) for name, value in cast("dict[object, object]", reply).items()}

    async def weight_version(self) -> int:
        """Return the policy version that the server was given last, in whole."""
        reply = cast("dict[str, object]", await self._get("/model_info"))
        try:
            return int(str(reply["weight_version"]))
        except (LookupError, ValueError) as error:
            raise EngineError(f"{self.name} /model_info: no weight_version in {reply}") from error

    async def checksum(self) -> str:
        """Return a checksum of the weights in memory: equal for equal weights on equally many ranks."""
        reply = cast("dict[str, object]", await self._post("/weights_checker", {"action": "checksum"}))
        try:
            return str(reply["per_engine_checksum"])
        except LookupError as error:
            raise EngineError(f"{self.name} /weights_checker: no checksum in {reply}") from error

    async def load(self) -> EngineLoad:
        """Return the load when the server last sampled it: at most 15 decoding steps ago, unless paused."""
        reply = await self._get("/v1/loads?include=core,queues")
        try:
            return parse_load(reply)
        except ValueError as error:
            raise EngineError(f"{self.name} /v1/loads: {error}") from error

    async def healthy(self) -> bool:
        """True if the server says within ``address.answer_timeout_s`` that it is well. Raises nothing.

        True as well while this process cannot ask, for reasons of its own: then nothing is known against the
        server.
        """
        try:
            async with asyncio.timeout(self.address.answer_timeout_s):
                await self._get("/health")
        except NotSent:
            return True
        except (EngineError, EngineLost):
            return False
        except TimeoutError:
            return self._is_starved
        return True


def parse_load(reply: object) -> EngineLoad:
    """Return the load of a server over all of its data-parallel ranks. Raises ValueError if malformed."""
    try:
        ranks = cast(_Loads, reply)["loads"]
        return EngineLoad(
            running=sum(int(rank["num_running_reqs"]) for rank in ranks),
            waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
            kv_use=max(float(rank["token_usage"]) for rank in ranks),
            retracted=sum(int(rank["queues"]["retracted"]) for rank in ranks),
            taken_s=max(float(rank["timestamp"]) for rank in ranks),
        )
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a reply of /v1/loads: {type(error).__name__}: {error}") from error
