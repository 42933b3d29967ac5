"""A process group of trainer ranks and the ranks of one engine, apart from either side's default group.

Every engine has a group of its own, so an engine that dies costs only itself. Torch offers no public call for
a group between processes of different default groups, so this module uses private ones, as SGLang does
(``init_custom_process_group``). ``tests/unit/test_bridge_peers.py`` lists them with digests of their source.

By torch's defaults, the watchdog of an NCCL group ends its process when a transfer fails: right for the ranks
of a trainer, which cannot go on without each other, and wrong here. ``POLICY`` makes a failed transfer raise
in the thread that waits for it, and another thread may end the wait (``leave``).
"""

import os
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
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


POLICY = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # wait() returns when a transfer is complete, and raises if it fails
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog takes note of a failure, and ends nothing
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nobody ends the process while the watchdog waits for an abort
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # other groups do not hear of it
}
"""Variables that torch reads when it makes an NCCL group: they hold for this group alone."""

_lock = threading.Lock()
_making = 0
"""Number of threads that make a group at present."""
_before: dict[str, str | None] = {}


@contextmanager
def error_policy() -> Generator[None]:
    """Make the groups that are made inside the block follow ``POLICY``.

    Threads may be in it at the same time: if a rank made its groups one after another, two ranks that begin
    with different groups would wait for each other.
    """
    global _making
    with _lock:
        if not _making:
            _before.update({name: os.environ.get(name) for name in POLICY})
            os.environ.update(POLICY)
        _making += 1
    try:
        yield
    finally:
        with _lock:
            _making -= 1
            if not _making:
                _restore()


def _restore() -> None:
    for name, value in _before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


class Peers:
    """This process's membership in a group."""

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        *,
        backend: str,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Meet the other members in ``store``. Blocks until all have come, at most ``timeout_s``.

        ``backend``: ``gloo``, or ``nccl`` on ``device``.
        """
        self._device = device if backend == "nccl" else None
        # A transfer that is stuck would hold up all work of the trainer that its own stream queues behind it.
        self._stream = torch.cuda.Stream(self._device) if self._device is not None else None
        with error_policy() if self._device is not None else nullcontext():
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
                    # Told the device, NCCL connects all members now, and not two with their first message.
                    device_id=self._device,
                ),
            )
        self._group: ProcessGroup | None = group_and_store[0]
        _world.pg_group_ranks[self._group] = {member: member for member in range(size)}

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
        if self._stream is None:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            return
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())  # which has queued what is sent
            with torch.cuda.stream(self._stream):
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
            self._stream.synchronize()

    def leave(self) -> None:
        """Leave the group. The other members fail in the transfers that they wait in, and so does a thread of
        this process.
        """
        group, self._group = self._group, None
        if group is None:
            return
        if self._device is not None:
            group.abort()  # NCCL's destroy waits for transfers that a dead member will never complete
        dist.destroy_process_group(group)
