"""Broadcast over a process group that joins the sender (rank 0) and every rank of every engine.

The group is not the trainer's default group: SGLang builds its side from a TCP rendezvous and a group name
(its ``init_custom_process_group``), and this side has to be built in exactly the same way.
"""

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
)


class Rendezvous:
    """Where the members of one group meet: a store on a free port of ``address``.

    It must outlive the group. Closing it makes everybody who still waits in it fail at once, on whichever
    machine, which is how a meeting is called off that one member will never come to.
    """

    def __init__(self, address: str, world_size: int, timeout_s: float) -> None:
        self.address = address
        self.world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._server: TCPStore | None = self._store(0, is_master=True)
        self.port: int = self._server.port

    def visit(self) -> TCPStore:
        """A connection to the store, to which its end is an error and not the end of the store."""
        return self._store(self.port, is_master=False)

    def close(self) -> None:
        """The store ends with the last reference to it."""
        self._server = None

    def _store(self, port: int, *, is_master: bool) -> TCPStore:
        return TCPStore(self.address, port, self.world_size, is_master, self._timeout, wait_for_workers=False)


class BroadcastFailed(RuntimeError):
    """A member is gone, or did not take its part in time."""


class BroadcastGroup:
    """Rank 0 of a group of 1 + (engine ranks) processes.

    With gloo, constructing it blocks until every engine rank has connected, at most ``timeout_s``; the
    engines' own join requests must therefore be under way at the same time. Raises when the rendezvous is
    closed.
    """

    def __init__(self, backend: str, rendezvous: Rendezvous, name: str, timeout_s: float) -> None:
        size = rendezvous.world_size
        self._rendezvous = rendezvous
        self._group, _ = _new_process_group_helper(
            size,
            0,
            [],
            Backend(backend),
            PrefixStore(name, rendezvous.visit()),
            group_name=name,
            timeout=timedelta(seconds=timeout_s),
        )
        _world.pg_group_ranks[self._group] = {i: i for i in range(size)}

    def send(self, flat: Tensor) -> None:
        """Broadcast one flat tensor. Raises when a peer is gone.

        With gloo it has left on return; with NCCL it is in the stream, and the engines' answers say the rest.
        """
        failure = None
        try:
            dist.broadcast(flat, group=self._group, group_src=0, async_op=True).wait()
        except RuntimeError as error:
            failure = str(error)
        # Raised out here, without a traceback that would hold the group: its connections, by which the other
        # members notice its end, are open as long as anything holds it.
        if failure is not None:
            raise BroadcastFailed(failure)

    def close(self) -> None:
        """The other members fail in what they wait for."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
        self._rendezvous.close()
