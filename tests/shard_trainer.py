"""The ranks of a trainer that trains nothing: their way out, shard by shard."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from torch.distributed import TCPStore

from slipstream.backend.trainer.publishing import DIRECT_BYTES, published_tensors
from slipstream.bridge.engine import orders
from slipstream.bridge.group.store import serve_store
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.publish.publication import Timeouts
from slipstream.bridge.publish.publisher import Publisher
from slipstream.bridge.shards.export import Parameters
from slipstream.bridge.shards.sends import Sends
from slipstream.bridge.transport.sender import ShardSender
from slipstream.bridge.transport.shards import ShardTransport
from slipstream.configs.schema import ShardsTransportConfig

LOOPBACK = "127.0.0.1"
T = TypeVar("T")


class ShardTrainer:
    """One rank of it, over gloo. All ranks are made at the same time."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        rank: int,
        wire: TCPStore,
        parameters: Parameters,
        *,
        timeouts: Timeouts,
        engines: int = 1,
        digests: bool = False,
        packed_bytes: int = ShardsTransportConfig().packed_mb * 2**20,
        direct_bytes: int = DIRECT_BYTES,
    ) -> None:
        """``wire``: a store that all ranks have joined. ``parameters`` have one type.

        ``packed_bytes`` and ``direct_bytes``: as ``packed`` and ``direct`` of ``Sends``.
        """
        dtype = next(iter(parameters[0].values())).dtype
        patience_s = 3 * timeouts.transfer_s
        store = serve_store(LOOPBACK, 0, 1, patience_s, wait=False) if rank == 0 else None
        if store is not None:
            wire.set("port", str(store.port))
        meeting = orders.Meeting(LOOPBACK, int(wire.get("port")), patience_s)
        sends = Sends(
            spec, layout, rank, packed=packed_bytes // dtype.itemsize, direct=direct_bytes // dtype.itemsize
        )
        self._sender = ShardSender(
            sends, parameters, rank, meeting, backend="gloo", timeout_s=timeouts.transfer_s
        )
        self._transport: ShardTransport | None = None
        if store is not None:
            self._transport = ShardTransport(
                store,
                meeting,
                published_tensors(spec, str(dtype).removeprefix("torch.")),
                trainer_ranks=layout.world_size,
                backend="gloo",
                timeouts=timeouts,
                engines=engines,
                digests=digests,
            )
            self._publisher = Publisher(self._transport, interrupt="retract", timeouts=timeouts)

    def publish(self, publication: Callable[[Publisher], Coroutine[Any, Any, T]]) -> T | None:
        """Take part in a publication, which rank 0 leads and whose result it returns."""
        if self._transport is None:
            self._sender.follow()
            return None
        following = threading.Thread(target=self._sender.follow, daemon=True)
        following.start()
        try:
            return asyncio.run(publication(self._publisher))
        finally:
            self._transport.finish()
            following.join()
