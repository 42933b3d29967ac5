"""Broadcast over a process group of the sender (rank 0) and every rank of every engine.

The group is not the trainer's default group. SGLang builds its side from a TCP rendezvous and a group name
(its ``init_custom_process_group``), and this side must be built in exactly the same way. Torch offers no
public call for that, so this module uses private ones.
"""

from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    ProcessGroup,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]  # public, but not declared so
    Work,
)
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
    _world,  # pyright: ignore[reportPrivateUsage]
)

from slipstream.bridge.transport.store import join_store, serve_store

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName


class Rendezvous:
    """The meeting point of one group: a store on a free port of ``address``, and of no other address.

    It must outlive the group. Closing it makes every process that still waits in it fail at once, on any
    machine. This is how a group is called off when a member will never join.
    """

    def __init__(self, address: str, world_size: int, timeout_s: float) -> None:
        self.address = address
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._server: TCPStore | None = serve_store(address, 0, world_size, timeout_s, wait=False)
        self.port: int = self._server.port

    def connect(self) -> TCPStore:
        """Return a connection to the store. It does not keep the store open, and fails when it closes."""
        return join_store(self.address, self.port, self.world_size, self._timeout_s, wait=False)

    def close(self) -> None:
        """Close the store, by dropping the last reference to it."""
        self._server = None


class BroadcastFailed(RuntimeError):
    """A member is gone, or did not take part in time."""


class BroadcastGroup:
    """Rank 0 of a group of 1 + (engine ranks) processes.

    With gloo, the constructor blocks until every engine rank has connected, at most ``timeout_s``; the
    engines' join requests must therefore be in flight at the same time. It raises if the rendezvous is
    closed.
    """

    def __init__(self, backend: str, rendezvous: Rendezvous, name: str, timeout_s: float) -> None:
        size = rendezvous.world_size
        self._rendezvous = rendezvous
        group_and_store = cast(
            "tuple[ProcessGroup, object]",
            _new_process_group_helper(
                size,
                0,
                [],
                Backend(backend),
                PrefixStore(name, rendezvous.connect()),
                group_name=cast("GroupName", name),
                timeout=timedelta(seconds=timeout_s),
            ),
        )
        self._group: ProcessGroup | None = group_and_store[0]
        _world.pg_group_ranks[self._group] = {i: i for i in range(size)}

    def send(self, flat: Tensor) -> None:
        """Broadcast one flat tensor. Raises BroadcastFailed if a peer is gone.

        With gloo the tensor has been sent on return. With NCCL the transfer is queued on the stream, and the
        engines' answers confirm it.
        """
        failure = None
        try:
            # No variable holds the work: it would keep the group's connections open, like a traceback below.
            cast("Work", dist.broadcast(flat, group=self._group, group_src=0, async_op=True)).wait()
        except RuntimeError as error:
            failure = str(error)
        # Raised here, because a traceback from inside the ``try`` would hold a reference to the group. Its
        # connections stay open as long as anything holds it, and the other members notice its end by them.
        if failure is not None:
            raise BroadcastFailed(failure)

    def close(self) -> None:
        """Leave the group. The other members fail in the calls that they wait in."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
        self._rendezvous.close()
