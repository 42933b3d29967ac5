"""The control interface that the bridge requires of an engine. Imports no torch.

``rollout`` implements it; the bridge depends on no particular engine.
"""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

Pause = Literal["retract", "in_place", "abort"]
"""Treatment of running requests: compute their KV cache again after the pause, keep it, or abort them."""

Interrupt = Literal["retract", "in_place", "abort", "drain"]

PAUSE: dict[Interrupt, Pause] = {
    "retract": "retract",
    "in_place": "in_place",
    "abort": "abort",
    "drain": "retract",
}
"""The pause of each interrupt.

With ``drain``, the senders of requests let the running ones finish before the publication. The engines are
paused nevertheless: without a pause SGLang would start new requests between two steps of an update, on
weights of two versions. Requests that outlast the draining are retracted.
"""


class EngineEndpoint(Protocol):
    """The control side of one engine.

    Every call raises if the engine refuses it. A ConnectionError means that the engine is gone or does not
    answer. A call that is given a ``version`` completes it: tokens sampled from then on are of that version.
    """

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> Hashable:
        """Identity of the engine's process. It changes with a restart; the new process is in no group."""
        ...

    @property
    def ranks(self) -> int: ...

    async def respond(self) -> None:
        """Return when the part of the engine has answered that computes."""
        ...

    async def pause(self, mode: Pause) -> None:
        """Stop generating. The KV cache is empty then, but for ``in_place``."""
        ...

    async def resume(self) -> None: ...

    # Weights arrive between these two, except from files.
    async def begin_update(self) -> None: ...
    async def end_update(self) -> None: ...

    # As an order to the engine's weight loader:
    async def take(self, handles: Sequence[bytes], *, load_format: str, version: int | None) -> None:
        """``handles``: one for each rank of the engine. ``load_format``: import path of the loader."""
        ...

    # From files:
    async def load_files(self, folder: Path, *, version: int) -> None: ...

    # An adapter beside weights that stay as they are:
    async def load_adapter(self, version: int, config: Mapping[str, object], tensors: bytes) -> None:
        """Load the adapter of ``version``, which no request uses yet, and unload others that none uses.

        ``config``: PEFT's. ``tensors``: by PEFT's names, as the engine reads them.
        """
        ...

    async def serve_adapter(self, version: int) -> None:
        """Let requests that start from now on use the adapter of ``version``. No request may run."""
        ...

    # No weights at all:
    async def rename_version(self, version: int) -> None:
        """Give the weights that the engine holds another version."""
        ...

    # From the replica of the weights beside the engine (``transport.replica``):
    async def replica_version(self) -> int | None:
        """Return the version of the replica; None if it is absent or incomplete."""
        ...

    async def replica_begin(self, files: bytes) -> None: ...
    async def replica_patch(self, number: int, patch: bytes) -> None: ...
    async def replica_commit(self, version: int) -> None: ...
    async def load_replica(self, *, version: int) -> None: ...


def error_text(error: BaseException) -> str:
    """Return an error as a report shows it."""
    return f"{type(error).__name__}: {error}"
