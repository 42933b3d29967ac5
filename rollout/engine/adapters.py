"""Engines that serve the policy as an adapter beside weights that stay as they are (SGLang 0.5.21).

SGLang names adapters, and binds a request to one for its whole life. The adapter of a policy version has the
version in its name, and the server states one version at a time. Requests name ``POLICY``, which is resolved
inside the server when it starts a request: to the adapter of the version that it states then.

    load "policy-8"         while requests use "policy-7"
    pause, by cutting off   nothing uses "policy-7" any more; new requests wait, and are not resolved yet
    state version 8         what is sampled from now on is of version 8 ...
    resume                  ... because every request that starts is resolved to "policy-8"
    unload "policy-7"       before "policy-9" is loaded

The engine attests the version of each token as ever, and it is that of the adapter which sampled the token:
both come from one variable of the server.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

POLICY = "policy"
"""Name by which requests ask for the adapter of the version that the server states."""

PREPARE = f"{__name__}.serve_policy"
"""Import path of what is done in the server's process before the server starts."""

POLL_S = 0.02
"""Seconds between two looks whether the requests that a pause cuts off have ended."""

ADAPTERS_IN_MEMORY = 2
"""Adapters that a GPU holds at a time: one that is loaded must not displace the one that requests use."""


@dataclass(frozen=True)
class AdapterServing:
    """The adapters that a server must be able to load."""

    rank: int
    modules: tuple[str, ...]
    """Last parts of the HF names of the adapted modules."""

    def server_args(self, device: str) -> dict[str, object]:
        """Return fields of SGLang's ServerArgs. ``device``: ``cuda`` or ``cpu``."""
        arguments: dict[str, object] = {
            "enable_lora": True,
            "max_lora_rank": self.rank,
            "lora_target_modules": list(self.modules),
            "max_loras_per_batch": ADAPTERS_IN_MEMORY,
        }
        # The other backends are kernels for GPUs.
        return arguments | ({"lora_backend": "torch_native"} if device == "cpu" else {})


def adapter_name(version: int | str) -> str:
    """Return the name of a version's adapter in a server.

    >>> adapter_name(8)
    'policy-8'
    """
    return f"{POLICY}-{version}"


def leftover_adapters(loaded: Sequence[str], served: int) -> list[str]:
    """Return the adapters of other versions than the served one among the names of loaded adapters."""
    return [name for name in loaded if name.startswith(f"{POLICY}-") and name != adapter_name(served)]


def serve_policy() -> None:
    """Prepare this process for a server whose policy is an adapter."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    _resolve_policy(TokenizerManager)
    _cut_off_at_once(TokenizerManager)


def _resolve_policy(manager: Any) -> None:
    """Let requests for ``POLICY`` use the adapter of the version that the server states as it starts them."""
    resolve = manager._resolve_lora_path

    async def resolve_policy_first(self: Any, obj: Any) -> None:
        if obj.lora_path != POLICY:
            await resolve(self, obj)
            return
        obj.lora_path = adapter_name(self.config_value("weight_version"))
        await resolve(self, obj)
        # The request is not counted: SGLang loses count of requests that are aborted in its queue, and would
        # wait for them for ever before it unloads the adapter. The pause has ended them all.
        await self.lora_registry.release(obj.lora_id)
        obj.lora_path = None

    manager._resolve_lora_path = resolve_policy_first


def _cut_off_at_once(manager: Any) -> None:
    """Let a pause that cuts requests off return when they have ended.

    SGLang looks once a second, which takes longer than anything else about a small adapter. Otherwise this is
    what it does: new requests wait, and those that have begun hold the lock.
    """
    pause = manager.pause_generation

    async def pause_at_once(self: Any, obj: Any) -> None:
        if obj.mode != "abort":
            await pause(self, obj)
            return
        async with self.is_pause_cond:
            self.is_pause = True
            while True:
                self.abort_request(abort_all=True)
                if not await self.model_update_lock.is_locked():
                    return
                await asyncio.sleep(POLL_S)

    manager.pause_generation = pause_at_once
