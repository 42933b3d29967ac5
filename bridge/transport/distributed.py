"""Broadcast over a process group that joins the sender (rank 0) and every rank of every engine.

The group is not the trainer's default group: SGLang builds its side from a TCP rendezvous and a group name
(its ``init_custom_process_group``), and this side has to be built in exactly the same way.
"""

import socket
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)


def free_port(address: str) -> int:
    """A TCP port that is free on ``address`` now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


class BroadcastGroup:
    """Rank 0 of a group of 1 + (engine ranks) processes.

    Constructing it blocks until every engine rank has connected, at most ``timeout_s``; the engines' own
    join requests must therefore be under way at the same time.
    """

    def __init__(self, backend: str, address: str, port: int, world_size: int, name: str, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        store, rank, world_size = next(rendezvous(f"tcp://{address}:{port}", 0, world_size, timeout=timeout))
        store.set_timeout(timeout)
        self._group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(backend),
            PrefixStore(name, store),
            group_name=name,
            timeout=timeout,
        )
        _world.pg_group_ranks[self._group] = {i: i for i in range(world_size)}

    def send(self, flat: Tensor) -> None:
        """Broadcast one flat tensor; blocks until it has left, and raises when a peer is gone."""
        work = dist.broadcast(flat, group=self._group, group_src=0, async_op=True)
        work.wait()

    def close(self) -> None:
        dist.destroy_process_group(self._group)
