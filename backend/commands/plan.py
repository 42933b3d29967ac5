"""``slipstream plan``: how a recipe lays the model out, and in which order its weights leave the trainer."""

import json
from collections import Counter
from collections.abc import Iterable
from operator import itemgetter
from typing import TypedDict

from rich.console import Console

from slipstream.backend.monitor.tables import rows_table
from slipstream.bridge.hf.index import ITEMSIZE
from slipstream.bridge.shards.plan import SENDER, ExportPlan
from slipstream.configs.schema import RunConfig

SHOWN = 20
"""Number of buckets that the table shows from either end; ``--json`` lists them all."""


class PlannedBucket(TypedDict):
    """One bucket of the export plan."""

    tensors: dict[str, list[int]]
    """Shapes by HF name."""
    dtype: str
    bytes: int
    bytes_from_rank: dict[int, int]


class PipelinePart(TypedDict):
    """The layers of one chunk of a pipeline stage."""

    stage: int
    chunk: int
    layers: int


class PlanDocument(TypedDict):
    """A layout and its export plan. Ranks are global ranks of the trainer."""

    model: str
    family: str
    parameters: int
    ranks: int
    layers: list[PipelinePart]
    bytes: int
    bytes_from_rank: dict[int, int]
    buckets: list[PlannedBucket]


def describe(config: RunConfig, plan: ExportPlan) -> PlanDocument:
    """Return the plan as one document."""
    itemsize = ITEMSIZE[config.model.dtype]
    sent: Counter[int] = Counter()
    buckets: list[PlannedBucket] = []
    for bucket in plan.buckets:
        size = 4 if bucket.float32 else itemsize
        by_owner: Counter[int] = Counter()
        for part in plan.parts(bucket):
            by_owner[part.owner] += part.numel * size
        sent += by_owner
        buckets.append(
            {
                "tensors": dict(zip(bucket.hf_names, map(list, bucket.hf_shapes), strict=True)),
                "dtype": "float32" if bucket.float32 else config.model.dtype,
                "bytes": bucket.numel * size,
                "bytes_from_rank": dict(sorted(by_owner.items())),
            }
        )
    layout = plan.layout
    return {
        "model": str(plan.spec.path),
        "family": plan.spec.geometry.family,
        "parameters": sum(bucket.numel for bucket in plan.buckets),
        "ranks": layout.world_size,
        "layers": [
            {"stage": part % layout.pipeline, "chunk": part // layout.pipeline, "layers": size}
            for part, size in enumerate(layout.part_sizes(plan.spec.geometry.n_layers))
        ],
        "bytes": sum(bucket["bytes"] for bucket in buckets),
        "bytes_from_rank": dict(sorted(sent.items())),
        "buckets": buckets,
    }


def as_json(config: RunConfig, plan: ExportPlan) -> str:
    """Return `describe` as JSON."""
    return json.dumps(describe(config, plan))


def print_plan(config: RunConfig, plan: ExportPlan, console: Console, *, weights: bool) -> None:
    """Print the layout, and with ``weights`` the export plan."""
    document, parallel, geometry = describe(config, plan), config.actor.parallel, plan.spec.geometry
    console.print(
        f"{document['family']}, {geometry.n_layers} layers, {document['parameters']:,} parameters: "
        f"{plan.spec.path}",
        markup=False,
    )
    context = f"context {parallel.context} * " if parallel.context > 1 else ""
    ways = f"tensor {parallel.tensor} * {context}pipeline {parallel.pipeline} * data {parallel.data}"
    console.print(f"{document['ranks']} trainer ranks: {ways}")
    if geometry.experts:
        console.print(
            f"{geometry.experts.count} experts over {parallel.expert} ranks, each on {plan.layout.etp}"
        )
    if parallel.pipeline > 1:
        sizes = ", ".join(str(part["layers"]) for part in document["layers"])
        console.print(f"layers of each part of the pipeline: {sizes}")
    if not weights:
        return
    console.print(
        f"\n{_size(document['bytes'])} leave through rank {SENDER} in {len(plan.buckets)} buckets, at most "
        f"{config.weights.transport.bucket_mb} MB each unless a tensor is larger"
    )
    rows: list[tuple[object, ...]] = [
        (
            number,
            len(bucket["tensors"]),
            _size(bucket["bytes"]),
            next(iter(bucket["tensors"])),
            _ranges(bucket["bytes_from_rank"]),
        )
        for number, bucket in enumerate(document["buckets"])
    ]
    if len(rows) > 2 * SHOWN:
        rows[SHOWN:-SHOWN] = [("...", "", "", "", "")]
    names = ("bucket", "tensors", "size", "first tensor", "from ranks")
    columns = {name: itemgetter(number) for number, name in enumerate(names)}
    console.print(rows_table("export plan", rows, columns, left=("first tensor", "from ranks")))
    sent = ", ".join(f"{rank}: {_size(size)}" for rank, size in document["bytes_from_rank"].items())
    console.print(f"sent by rank: {sent}")


def _size(bytes_: int) -> str:
    return f"{bytes_ / 1e9:.2f} GB" if bytes_ >= 1e9 else f"{bytes_ / 1e6:.1f} MB"


def _ranges(ranks: Iterable[int]) -> str:
    """
    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    ranges: list[tuple[int, int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
