"""From the trainer's ranks to the engines, over the transport that the recipe names.

Every rank calls ``RankPublisher.publish`` at the same time. Rank 0, the head, talks to the engines; the
others contribute their shards.
"""

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, assert_never, cast

import torch
import torch.distributed as dist

from slipstream.backend.trainer.engine_checkpoint import engine_model_of
from slipstream.bridge.engine import orders
from slipstream.bridge.group.store import serve_store
from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.index import stored_tensors
from slipstream.bridge.hf.quantization import EngineFp8
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.publish.endpoint import EngineEndpoint
from slipstream.bridge.publish.publication import Timeouts
from slipstream.bridge.publish.publisher import Publisher, Transport
from slipstream.bridge.publish.report import PublishReport
from slipstream.bridge.shards.export import Parameters, export
from slipstream.bridge.shards.fp8 import engine_fp8
from slipstream.bridge.shards.plan import SENDER, ExportPlan, entries
from slipstream.bridge.shards.quantize import engine_buckets
from slipstream.bridge.shards.sends import Sends
from slipstream.bridge.transport.adapter import AdapterTransport
from slipstream.bridge.transport.delta import DeltaTransport
from slipstream.bridge.transport.disk import DiskTransport
from slipstream.bridge.transport.sender import ShardSender
from slipstream.bridge.transport.shards import ShardTransport
from slipstream.bridge.transport.tensor import TensorTransport
from slipstream.configs.schema import (
    DeltaTransportConfig,
    DiskTransportConfig,
    EngineConfig,
    ModelConfig,
    ShardsTransportConfig,
    TensorTransportConfig,
    WeightsConfig,
)
from slipstream.rollout.engine.client import EngineAddress, EngineClient

if TYPE_CHECKING:
    from slipstream.backend.megatron.lora import AdapterExport

VERSIONS = "weights"
"""Folder of the disk transport's versions within the run folder."""

DIRECT_BYTES = 1 << 20
"""Runs of this length travel from place to place. Shorter ones are packed: a message has a fixed cost."""


@dataclass(frozen=True)
class RankWeights:
    """The weights of one rank of the trainer."""

    plan: ExportPlan
    parameters: Parameters
    adapter: "AdapterExport | None"
    """The adapter, which is published in place of weights if the engines serve it alone."""
    address: str
    """Address of the head, for the engines and the other ranks."""
    device: torch.device


class RankPublisher(Protocol):
    """One rank's part of publishing. Lives as long as the trainer."""

    def publish(self, version: int, engines: Sequence[EngineAddress]) -> PublishReport | None:
        """Bring the engines to the present weights as ``version``. Returns the report on the head."""
        ...

    def close(self) -> None:
        """Let go of the engines. Collective, as ``publish`` is, and the last call."""
        ...


def rank_publisher(
    config: WeightsConfig,
    engine: EngineConfig,
    model: ModelConfig,
    run: Path,
    source: RankWeights,
    written: Callable[[Path], object] | None,
) -> RankPublisher:
    """Return the publisher of this rank. Collective: all ranks call it at the same time.

    ``run``: the run folder.
    ``written``: as in ``DiskTransport``; other transports write no files.
    """
    transport = config.transport
    if (adapter := source.adapter) is not None:
        # Requests that outlast the draining are cut off, too: each is bound to the adapter it began with.
        publisher = Publisher(
            AdapterTransport(adapter.adapter, source.plan.spec.path),
            interrupt="abort",
            timeouts=_timeouts(config),
        )
        return BucketPublisher(publisher, adapter.buckets)
    if isinstance(transport, ShardsTransportConfig):
        return ShardPublisher(config, engine, model.dtype, transport, source)
    fp8 = engine_fp8(engine.quantization, source.plan.spec)
    sent: Transport
    match transport:
        case TensorTransportConfig():
            sent = TensorTransport(source.device)
        case DiskTransportConfig(path=path):
            sent = _disk_transport(path or run / VERSIONS, source.plan, model.dtype, fp8, written)
        case DeltaTransportConfig():
            engines_start_from = engine_model_of(model, engine.quantization, run, source.plan.spec).path
            sent = DeltaTransport(source.plan, engines_start_from, model.dtype, fp8)
        case _:
            assert_never(transport)
    publisher = _publisher(config, engine, sent)
    return BucketPublisher(
        publisher,
        lambda: engine_buckets(export(source.plan, source.parameters, dist.get_rank()), fp8),
    )


class BucketPublisher:
    """Whole tensors, gathered on the head."""

    def __init__(self, publisher: Publisher, export: Callable[[], Iterator[FlatBucket | None]]) -> None:
        """``export``: collective; yields the tensors on the head, and None on other ranks."""
        self._publisher = publisher
        self._export = export

    def publish(self, version: int, engines: Sequence[EngineAddress]) -> PublishReport | None:
        buckets = self._export()
        if dist.get_rank() != SENDER:
            for _ in buckets:  # iterating sends this rank's parts
                pass
            return None
        return asyncio.run(publish_to(self._publisher, version, engines, buckets))

    def close(self) -> None:
        """Do nothing: no engine is connected."""


class ShardPublisher:
    """The shards of every rank, straight into the engines' parameters."""

    def __init__(
        self,
        config: WeightsConfig,
        engine: EngineConfig,
        dtype_name: str,
        transport: ShardsTransportConfig,
        source: RankWeights,
    ) -> None:
        """``dtype_name``: that of the model, by torch's name."""
        rank, timeouts = dist.get_rank(), _timeouts(config)
        backend = "nccl" if source.device.type == "cuda" else "gloo"
        # Between two commands lie a transfer and some answers of the engines.
        patience_s = 2 * timeouts.transfer_s + 6 * timeouts.answer_s
        store = serve_store(source.address, 0, 1, patience_s, wait=False) if rank == SENDER else None
        port = torch.tensor([store.port if store else 0], device=source.device)
        dist.broadcast(port, SENDER)
        meeting = orders.Meeting(source.address, int(port), patience_s)
        spec, layout = source.plan.spec, source.plan.layout
        dtype = getattr(torch, dtype_name)
        sends = Sends(
            spec,
            layout,
            rank,
            packed=transport.packed_mb * 2**20 // dtype.itemsize,
            direct=DIRECT_BYTES // dtype.itemsize,
        )
        self._sender = ShardSender(
            sends, source.parameters, rank, meeting, backend=backend, timeout_s=timeouts.transfer_s
        )
        self._transport: ShardTransport | None = None
        if store is not None:
            self._transport = ShardTransport(
                store,
                meeting,
                published_tensors(spec, dtype_name),
                trainer_ranks=layout.world_size,
                backend=backend,
                timeouts=timeouts,
                engines=engine.most,
                digests=config.verify.type == "digests",
            )
            self._publisher = _publisher(config, engine, self._transport)

    def publish(self, version: int, engines: Sequence[EngineAddress]) -> PublishReport | None:
        if self._transport is None:
            self._sender.follow()
            return None
        with self._leading(self._transport):
            return asyncio.run(publish_to(self._publisher, version, engines, iter(())))

    def close(self) -> None:
        if self._transport is None:
            self._sender.follow()
            return
        with self._leading(self._transport):
            self._transport.leave()

    @contextmanager
    def _leading(self, transport: ShardTransport) -> Generator[None]:
        """Let the ranks, this one too, follow the commands that the head gives inside the block."""
        sending = threading.Thread(target=self._sender.follow, name="shards", daemon=True)
        sending.start()
        try:
            yield
        finally:
            transport.finish()
            sending.join()


def published_tensors(spec: ModelSpec, dtype: str) -> list[orders.Tensor]:
    """Return all HF tensors of a model, those included that are not trained: engines keep them as they have
    loaded them. ``dtype``: that of the model, by torch's name.
    """
    # By name, because the entries of stacked experts share their tensors.
    tensors = {
        name: orders.Tensor(name, shape, "float32" if entry.mapping.float32 else dtype)
        for entry in entries(spec, Layout())
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)
    }
    if prefixes := spec.mappings.passed_through:
        stored = stored_tensors(spec.path)
        tensors |= {
            name: orders.Tensor(name, tensor.shape, dtype)
            for name, tensor in stored.items()
            if name.startswith(prefixes)
        }
    return list(tensors.values())


def _timeouts(weights: WeightsConfig) -> Timeouts:
    return Timeouts(transfer_s=weights.timeout_s, answer_s=min(weights.answer_timeout_s, weights.timeout_s))


def _publisher(weights: WeightsConfig, engine: EngineConfig, transport: Transport) -> Publisher:
    return Publisher(
        transport,
        # Engines that take turns with the trainer are stopped during the training step already.
        interrupt=None if engine.takes_turns else weights.interrupt,
        timeouts=_timeouts(weights),
    )


def _disk_transport(
    folder: Path,
    plan: ExportPlan,
    dtype: str,
    fp8: EngineFp8 | None,
    written: Callable[[Path], object] | None,
) -> DiskTransport:
    names = [name for bucket in plan.buckets for name in bucket.hf_names]
    return DiskTransport(
        folder,
        plan.spec.path,
        written,
        dtype=getattr(torch, dtype),
        quantization=None if fp8 is None else fp8.config(names),
        kept=replace(plan.spec.kept, passed_through=plan.spec.mappings.passed_through),
    )


async def publish_to(
    publisher: Publisher,
    version: int,
    engines: Sequence[EngineAddress],
    buckets: Iterator[FlatBucket | None],
) -> PublishReport:
    """Publish to the engines at these addresses as ``version``."""
    clients = [EngineClient(address) for address in engines]
    try:
        # The protocol has mutable attributes, for which a client's narrower types are no match.
        return await publisher.publish(version, cast("Sequence[EngineEndpoint]", clients), buckets)
    finally:
        for client in clients:
            await client.close()
