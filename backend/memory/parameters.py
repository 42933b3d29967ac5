"""Elements of the model that a rank of the trainer holds. They follow from the bridge's mappings: exact.

Megatron keeps gradients, and with the distributed optimizer the weights too, in contiguous buffers: one for
dense and one for expert parameters of each part of the model. For the distributed optimizer each parameter
starts at a multiple of 64 elements and each bucket ends at a multiple of lcm(ranks, 128), so that all ranks
have equal shares of it (``param_and_grad_buffer`` of Megatron-Core).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm, prod
from typing import Literal

from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.mapping import OUTPUT
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.adapter import is_adapted
from slipstream.bridge.shards.plan import Entry, entries
from slipstream.configs.schema.actor import LoraConfig

ALIGNMENT, BUCKET_ALIGNMENT = 64, 128
"""Elements to whose multiples Megatron pads parameters and buckets."""

BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK = 40_000_000, 1_000_000
"""Fewest elements of a bucket with ``overlap_grad_reduce``, and the same per data-parallel rank."""


@dataclass(frozen=True)
class Shapes:
    """Elements of every parameter of one part of the model on one rank, in the order of the forward pass."""

    dense: tuple[int, ...]
    expert: tuple[int, ...]
    single: tuple[int, ...] = ()
    """Dense parameters in single precision. In a model of half precision they have a buffer of their own."""

    @property
    def total(self) -> int:
        return sum(self.dense) + sum(self.expert) + sum(self.single)


@dataclass
class _Lists:
    """``Shapes`` in the making."""

    dense: list[int] = field(default_factory=list[int])
    expert: list[int] = field(default_factory=list[int])
    single: list[int] = field(default_factory=list[int])

    def of(self, kind: Literal["dense", "expert", "single"]) -> list[int]:
        return {"dense": self.dense, "expert": self.expert, "single": self.single}[kind]

    @property
    def shapes(self) -> Shapes:
        return Shapes(tuple(self.dense), tuple(self.expert), tuple(self.single))


@dataclass(frozen=True)
class StageParameters:
    """Parameters of each rank of one pipeline stage: the ranks of a stage hold equally many."""

    weights: tuple[Shapes, ...]
    """All weights, by part of the model."""
    trained: tuple[Shapes, ...]
    """Weights with a gradient, by part of the model: the adapters, or else all but those that are frozen."""
    adapters: int
    """Elements of adapters, which are not among ``weights``."""
    buffers: int
    """Elements in single precision that are no parameters: the biases that choose experts."""

    @property
    def total(self) -> int:
        """Number of weights, adapters included."""
        return sum(part.total for part in self.weights) + self.adapters


def stage_parameters(
    spec: ModelSpec, layout: Layout, lora: LoraConfig | None = None
) -> list[StageParameters]:
    """Return the parameters of a rank of each pipeline stage. Raises UnevenSplit."""
    weights = [[_Lists() for _ in range(layout.chunks)] for _ in range(layout.pipeline)]
    trained = [[_Lists() for _ in range(layout.chunks)] for _ in range(layout.pipeline)]
    buffers = [0] * layout.pipeline

    def add(entry: Entry, stage: int, chunk: int) -> None:
        is_expert = entry.expert is not None
        shape = entry.split.shard_shape(layout.etp if is_expert else layout.tensor)
        if entry.mapping.float32 and entry.mapping.frozen:
            buffers[stage] += prod(shape)
            return
        kind: Literal["dense", "expert", "single"] = (
            "single" if entry.mapping.float32 else "expert" if is_expert else "dense"
        )
        weights[stage][chunk].of(kind).append(prod(shape))
        if lora is None and not entry.mapping.frozen:
            trained[stage][chunk].of(kind).append(prod(shape))
        if lora is not None and is_adapted(entry.parameter, lora.targets):
            rows, columns = shape
            trained[stage][chunk].of(kind).extend((lora.rank * columns, rows * lora.rank))

    for entry in entries(spec, layout):
        if entry.expert in (None, 0):
            add(entry, entry.stage, entry.chunk)
    if spec.geometry.tied_embeddings and layout.pipeline > 1:
        [words] = spec.mappings.embedding
        last = layout.pipeline - 1
        add(Entry(words, last, layout.chunks - 1, OUTPUT, words.hf, None), last, -1)
    stages: list[StageParameters] = []
    for stage in range(layout.pipeline):
        held = tuple(lists.shapes for lists in weights[stage])
        changed = tuple(lists.shapes for lists in trained[stage])
        adapters = 0 if lora is None else sum(part.total for part in changed)
        stages.append(StageParameters(held, changed, adapters, buffers[stage]))
    return stages


@dataclass(frozen=True)
class Buffer:
    """Megatron's buffer for some parameters."""

    elements: int
    """Padding included."""
    largest_share: int
    """Elements that the optimizer of a data-parallel rank updates, on the rank with the most."""


def buffer_of(parameters: Sequence[int], ranks: int, *, distributed: bool, buckets: bool) -> Buffer:
    """Return the buffer for ``parameters``, which are in the order of the forward pass.

    ranks: the data-parallel ranks that share the buffer. buckets: gradients are reduced bucket by bucket
    (``overlap_grad_reduce``, on the first pipeline stage).
    """
    if not distributed:
        return Buffer(sum(parameters), sum(parameters))
    multiple = lcm(ranks, BUCKET_ALIGNMENT)
    most = max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * ranks)
    shares = [0] * ranks
    end = first = 0
    pending: list[tuple[int, int]] = []

    def close_bucket() -> None:
        nonlocal end, first
        end = _padded(end, multiple)
        share = (end - first) // ranks
        for start, stop in pending:
            for rank in range((start - first) // share, (stop - 1 - first) // share + 1):
                low, high = first + rank * share, first + (rank + 1) * share
                shares[rank] += min(stop, high) - max(start, low)
        pending.clear()
        first = end

    for elements in reversed(parameters):
        start = _padded(end, ALIGNMENT)
        end = start + elements
        pending.append((start, end))
        if buckets and end - first >= most:
            close_bucket()
    if pending:
        close_bucket()
    return Buffer(end, max(shares))


def _padded(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple
