"""``slipstream plan``: how a recipe lays the model out, and in which order its weights leave the trainer."""

import json
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.bridge.hf.index import ITEMSIZE
from slipstream.bridge.shards.plan import SENDER, ExportPlan
from slipstream.configs.schema import RunConfig

SHOWN = 20
"""Buckets that the table shows from either end; ``--json`` has them all."""


def describe(config: RunConfig, plan: ExportPlan) -> dict[str, Any]:
    """The plan as one JSON document."""
    itemsize = ITEMSIZE[config.model.dtype]
    sent: Counter[int] = Counter()
    buckets = []
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
    return json.dumps(describe(config, plan))


def print_plan(config: RunConfig, plan: ExportPlan, console: Console, *, weights: bool) -> None:
    """The layout, and with ``weights`` the export plan."""
    about, parallel, geometry = describe(config, plan), config.actor.parallel, plan.spec.geometry
    console.print(
        f"{about['family']}, {geometry.n_layers} layers, {about['parameters']:,} parameters: "
        f"{plan.spec.path}",
        markup=False,
    )
    context = f"context {parallel.context} * " if parallel.context > 1 else ""
    ways = f"tensor {parallel.tensor} * {context}pipeline {parallel.pipeline} * data {parallel.data}"
    console.print(f"{about['ranks']} trainer ranks: {ways}")
    if geometry.experts:
        console.print(
            f"{geometry.experts.count} experts over {parallel.expert} ranks, each on {plan.layout.etp}"
        )
    if parallel.pipeline > 1:
        sizes = ", ".join(str(part["layers"]) for part in about["layers"])
        console.print(f"layers of each part of the pipeline: {sizes}")
    if not weights:
        return
    console.print(
        f"\n{_size(about['bytes'])} leave through rank {SENDER} in {len(plan.buckets)} buckets, at most "
        f"{config.weights.transport.bucket_mb} MB each unless a tensor is larger"
    )
    table = Table("bucket", "tensors", "size", "first tensor", "from ranks")
    shown = range(len(plan.buckets))
    if len(shown) > 2 * SHOWN:
        shown = [*shown[:SHOWN], *shown[-SHOWN:]]
    for number in shown:
        if number and number - 1 not in shown:
            table.add_row("...")
        bucket, found = plan.buckets[number], about["buckets"][number]
        ranks = _ranges(list(found["bytes_from_rank"]))
        table.add_row(
            str(number), str(len(bucket.hf_names)), _size(found["bytes"]), bucket.hf_names[0], ranks
        )
    console.print(table)
    console.print(
        "sent by rank: " + ", ".join(f"{r}: {_size(n)}" for r, n in about["bytes_from_rank"].items())
    )


def _size(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def _ranges(ranks: list[int]) -> str:
    """
    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
