"""What the bridge asks of an engine. ``rollout`` answers it; the bridge knows no engine by name."""

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Literal, Protocol

Pause = Literal["retract", "in_place", "abort"]
"""Running requests: their KV is computed again after the pause, or it is kept, or they are given up."""

Interrupt = Literal["retract", "in_place", "abort", "drain"]

PAUSE: dict[Interrupt, Pause] = {
    "retract": "retract",
    "in_place": "in_place",
    "abort": "abort",
    "drain": "retract",
}
"""Draining is done before, by whoever sends the requests: without a pause SGLang lets new ones run between
any two steps of an update, on weights of two versions. The pause then finds an idle engine, but for requests
that outlasted the draining."""


class EngineEndpoint(Protocol):
    """The control side of one engine. Every call raises on refusal; a ConnectionError means that the engine
    is gone or does not answer.

    A load that is given a ``version`` completes it: what is sampled from then on is of that version.
    """

    name: str
    address: Hashable
    """Another one once the engine was started again under its name: the new process is in no group."""
    ranks: int

    async def pause(self, mode: Pause) -> None: ...
    async def resume(self) -> None: ...

    # Weights come in between these two, unless they come from files.
    async def begin_update(self) -> None: ...
    async def end_update(self) -> None: ...

    # over a process group
    async def join_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str
    ) -> None: ...
    async def leave_group(self, group: str) -> None: ...
    async def receive(
        self,
        *,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtype: str,
        group: str,
        flush_cache: bool,
        version: int | None,
    ) -> None: ...

    # from memory that sender and engine share
    async def take(self, handles: Sequence[bytes], *, flush_cache: bool, version: int | None) -> None:
        """``handles``: one for each rank of the engine."""
        ...

    # from files
    async def load_files(self, folder: Path, *, flush_cache: bool, version: int) -> None: ...

    # from a copy of the weights that is kept beside the engine (``slipstream.bridge.replica``)
    async def replica_version(self) -> int | None:
        """The version of the copy; None when there is none, or part of one."""
        ...

    async def replica_begin(self, files: bytes) -> None: ...
    async def replica_patch(self, number: int, patch: bytes) -> None: ...
    async def replica_commit(self, version: int) -> None: ...
    async def load_replica(self, *, flush_cache: bool, version: int) -> None: ...


def told(error: BaseException) -> str:
    """An error as a report shows it."""
    return f"{type(error).__name__}: {error}"
