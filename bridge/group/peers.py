"""A process group of trainer ranks and the ranks of one engine, apart from either side's default group.

Every engine has a group of its own, so an engine that dies costs only itself. Torch offers no public call for
a group between processes of different default groups, so this module uses private ones, as SGLang does
(``init_custom_process_group``).
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]  # public, but not declared so
)
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
    _world,  # pyright: ignore[reportPrivateUsage]
)

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName


class Peers:
    """This process's membership in a group."""

    def __init__(
        self, store: Store, name: str, rank: int, size: int, *, backend: str, timeout_s: float
    ) -> None:
        """Meet the other members in ``store``. Blocks until all have come, at most ``timeout_s``.

        ``backend``: ``gloo``, or ``nccl`` on the current CUDA device.
        """
        # Told the device, NCCL connects all members now, and not two of them with their first message.
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        group_and_store = cast(
            "tuple[ProcessGroup, object]",
            _new_process_group_helper(
                size,
                rank,
                [],
                Backend(backend),
                PrefixStore(f"group/{name}", store),
                group_name=cast("GroupName", name),
                timeout=timedelta(seconds=timeout_s),
                device_id=device,
            ),
        )
        self._group: ProcessGroup | None = group_and_store[0]
        _world.pg_group_ranks[self._group] = {member: member for member in range(size)}
        self._device = device

    def send(self, messages: Sequence[tuple[int, Tensor]]) -> None:
        """Send each tensor to a member, and return when all have left. Raises RuntimeError if one is gone."""
        self._exchange(dist.isend, messages)

    def receive(self, messages: Sequence[tuple[int, Tensor]]) -> None:
        """Receive each tensor from a member. Raises RuntimeError if one is gone."""
        self._exchange(dist.irecv, messages)

    def _exchange(self, operation: object, messages: Sequence[tuple[int, Tensor]]) -> None:
        if not messages:
            return
        group = self._group
        if group is None:
            raise RuntimeError("the group was left")
        operations = [
            dist.P2POp(operation, tensor, None, group, group_peer=member)  # pyright: ignore[reportArgumentType]
            for member, tensor in messages
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if self._device is not None:
            torch.cuda.current_stream().synchronize()  # NCCL's wait only orders the streams

    def leave(self) -> None:
        """Leave the group. The other members fail in the transfers that they wait in, and so does a thread of
        this process.
        """
        group, self._group = self._group, None
        if group is None:
            return
        abort = getattr(group, "abort", None)
        if self._device is not None and abort is not None:
            abort()  # NCCL's destroy waits for transfers that a dead member will never complete
        dist.destroy_process_group(group)
