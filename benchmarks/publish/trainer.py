"""Ranks of a trainer with random shards, and the publication of a version to one engine."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.publish.engine import CountingClient
from slipstream.bridge.families import spec_of
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.publish.publication import Timeouts
from slipstream.bridge.publish.publisher import Publisher
from slipstream.bridge.publish.report import PublishReport
from slipstream.bridge.shards.plan import entries_of
from slipstream.rollout.engine.client import EngineAddress
from tests.shard_trainer import ShardTrainer

TIMEOUTS = Timeouts(120.0, 120.0)


def random_trainer(
    hf: Mapping[str, object], layout: Layout, rank: int, wire: TCPStore, dtype: torch.dtype
) -> ShardTrainer:
    """Return a rank of a trainer. ``wire``: as in ``ShardTrainer``."""
    spec = spec_of(dict(hf), Path())
    parameters: list[dict[str, torch.Tensor]] = [{} for _ in range(layout.chunks)]
    generator = torch.Generator().manual_seed(rank)
    for entry, shard in entries_of(spec, layout, rank):
        parameter = torch.empty(entry.split.shard_shape(shard.size), dtype=dtype)
        parameters[entry.chunk][entry.parameter] = parameter.normal_(std=0.02, generator=generator)
    return ShardTrainer(spec, layout, rank, wire, parameters, timeouts=TIMEOUTS)


async def published(
    publisher: Publisher, version: int, engine: EngineAddress
) -> tuple[PublishReport, Counter[str]]:
    """Bring the engine to ``version``. Returns the report and the requests by path.

    Raises RuntimeError if the engine fails.
    """
    async with CountingClient(engine) as client:
        report = await publisher.publish(version, [client], iter(()))
        if report.failed:
            raise RuntimeError(f"the engine has failed: {report.failed}")
        return report, client.requests
