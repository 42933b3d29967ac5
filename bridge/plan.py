"""What is exported, in which order, in which buckets. Pure: no tensors, no process groups, no torch.

    family mappings + layout  ->  ExportPlan (ordered buckets)

Every rank computes the same plan and walks it in the same order, which is what keeps collectives matched:
a bucket belongs to one pipeline stage, is gathered over the tensor-parallel ranks of that stage and then
handed to the sender.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from bridge.families import ModelSpec
from bridge.layout import Layout
from bridge.mapping import Mapping, Shape


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter on its pipeline stage and the HF tensors that it becomes."""

    mapping: Mapping
    stage: int
    parameter: str
    """Name inside the stage's model chunk; layers are counted from the first of the stage."""
    hf_names: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]

    @property
    def numel(self) -> int:
        return sum(map(prod, self.hf_shapes))


@dataclass(frozen=True)
class Bucket:
    """Consecutive entries of one stage that are gathered and sent together."""

    stage: int
    entries: tuple[Entry, ...]

    @property
    def hf_names(self) -> tuple[str, ...]:
        return tuple(name for entry in self.entries for name in entry.hf_names)

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return tuple(shape for entry in self.entries for shape in entry.hf_shapes)

    @property
    def numel(self) -> int:
        return sum(entry.numel for entry in self.entries)


@dataclass(frozen=True)
class ExportPlan:
    spec: ModelSpec
    layout: Layout
    buckets: tuple[Bucket, ...]


def stage_entries(spec: ModelSpec, layout: Layout, stage: int) -> Iterator[Entry]:
    """The parameters that pipeline stage ``stage`` owns, in the order of the forward pass."""

    def entry(mapping: Mapping, layer: int | None = None, local: int | None = None) -> Entry:
        name = mapping.name(layout.layer_spec)
        return Entry(
            mapping,
            stage,
            name if local is None else name.format(layer=local),
            tuple(hf if layer is None else hf.format(layer=layer) for hf in mapping.hf),
            mapping.hf_shapes(spec.geometry),
        )

    if stage == 0:
        yield from map(entry, spec.mappings.embedding)
    for local, layer in enumerate(layout.layers_of(stage, spec.geometry.n_layers)):
        yield from (entry(mapping, layer, local) for mapping in spec.mappings.layer)
    if stage == layout.pipeline - 1:
        yield from map(entry, spec.mappings.head)


def make_plan(spec: ModelSpec, layout: Layout, bucket_bytes: int, itemsize: int) -> ExportPlan:
    """Buckets of at most ``bucket_bytes`` (a single larger parameter has a bucket of its own)."""
    buckets: list[Bucket] = []
    for stage in range(layout.pipeline):
        pending: list[Entry] = []
        size = 0
        for entry in stage_entries(spec, layout, stage):
            if pending and size + entry.numel * itemsize > bucket_bytes:
                buckets.append(Bucket(stage, tuple(pending)))
                pending, size = [], 0
            pending.append(entry)
            size += entry.numel * itemsize
        if pending:
            buckets.append(Bucket(stage, tuple(pending)))
    return ExportPlan(spec, layout, tuple(buckets))
