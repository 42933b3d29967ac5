"""From the sender's buckets to the engines, over the transport that the recipe names."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast
from uuid import uuid4

from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.publish.endpoint import EngineEndpoint
from slipstream.bridge.publish.publication import Timeouts
from slipstream.bridge.publish.publisher import Publisher, Transport
from slipstream.bridge.publish.report import PublishReport
from slipstream.bridge.shards.plan import ExportPlan
from slipstream.bridge.transport.delta import DeltaTransport
from slipstream.bridge.transport.disk import DiskTransport
from slipstream.bridge.transport.distributed import DistributedTransport
from slipstream.bridge.transport.tensor import TensorTransport
from slipstream.configs.schema import RunConfig
from slipstream.rollout.engine.client import EngineAddress, EngineClient

VERSIONS = "weights"
"""Folder of the disk transport's versions within the run folder."""


def make_publisher(
    config: RunConfig,
    plan: ExportPlan,
    *,
    address: str,
    backend: str,
    written: Callable[[Path], object] | None = None,
) -> Publisher:
    """Make the publisher of the recipe. address: of this process, for the engines. backend: nccl or gloo.

    written: as in ``DiskTransport``; other transports write no files.
    """
    weights = config.weights
    answer_s = min(weights.answer_timeout_s, weights.timeout_s)
    timeouts = Timeouts(transfer_s=weights.timeout_s, answer_s=answer_s)
    return Publisher(
        _transport(config, plan, address, backend, timeouts, written),
        # Colocated engines are stopped during the training step already.
        interrupt=None if config.rollout.engine.colocated else weights.interrupt,
        timeouts=timeouts,
    )


def _transport(
    config: RunConfig,
    plan: ExportPlan,
    address: str,
    backend: str,
    timeouts: Timeouts,
    written: Callable[[Path], object] | None,
) -> Transport:
    transport = config.weights.transport
    match transport.type:
        case "distributed":
            label = f"weights-{uuid4().hex}"
            return DistributedTransport(address=address, backend=backend, timeouts=timeouts, label=label)
        case "tensor":
            return TensorTransport()
        case "disk":
            folder = transport.path or config.run.folder / VERSIONS
            return DiskTransport(folder, plan.spec.path, written)
        case "delta":
            return DeltaTransport(plan, config.model.dtype)


async def publish_to(
    publisher: Publisher,
    version: int,
    engines: Sequence[EngineAddress],
    buckets: Iterator[FlatBucket | None],
) -> PublishReport:
    """Publish ``buckets`` to the engines at these addresses as ``version``."""
    clients = [EngineClient(address) for address in engines]
    try:
        # The protocol has mutable attributes, for which a client's narrower types are no match.
        return await publisher.publish(version, cast("Sequence[EngineEndpoint]", clients), buckets)
    finally:
        for client in clients:
            await client.close()
