"""Elements of the model that a rank of the trainer holds. They follow from the bridge's mappings: exact.

Megatron keeps gradients, and with the distributed optimizer the weights too, in contiguous buffers: one for
dense and one for expert parameters of each part of the model. For the distributed optimizer each parameter
starts at a multiple of 64 elements and each bucket ends at a multiple of lcm(ranks, 128), so that all ranks
have equal shares of it (``param_and_grad_buffer`` of Megatron-Core).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod

from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.spec import ModelSpec
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

    @property
    def total(self) -> int:
        return sum(self.dense) + sum(self.expert)


@dataclass(frozen=True)
class StageParameters:
    """Parameters of each rank of one pipeline stage: the ranks of a stage hold equally many."""

    weights: tuple[Shapes, ...]
    """All weights, by part of the model."""
    trained: tuple[Shapes, ...]
    """Weights with a gradient, by part of the model: the adapters, or else all."""
    buffers: int
    """Elements in single precision that are no parameters: the biases that choose experts."""

    @property
    def total(self) -> int:
        """Number of weights, adapters included."""
        adapters = 0 if self.trained is self.weights else sum(part.total for part in self.trained)
        return sum(part.total for part in self.weights) + adapters


def stage_parameters(
    spec: ModelSpec, layout: Layout, lora: LoraConfig | None = None
) -> list[StageParameters]:
    """Return the parameters of a rank of each pipeline stage. Raises UnevenSplit."""
    weights = [[([], []) for _ in range(layout.chunks)] for _ in range(layout.pipeline)]
    adapters = [[([], []) for _ in range(layout.chunks)] for _ in range(layout.pipeline)]
    buffers = [0] * layout.pipeline

    def add(entry: Entry, stage: int, chunk: int) -> None:
        is_expert = entry.expert is not None
        shape = entry.split.shard_shape(layout.etp if is_expert else layout.tensor)
        if entry.mapping.float32:
            buffers[stage] += prod(shape)
            return
        weights[stage][chunk][is_expert].append(prod(shape))
        if lora is not None and _is_adapted(entry, lora):
            rows, columns = shape
            adapters[stage][chunk][is_expert].extend((lora.rank * columns, rows * lora.rank))

    for entry in entries(spec, layout):
        if entry.expert in (None, 0):
            add(entry, entry.stage, entry.chunk)
    if spec.geometry.tied_embeddings and layout.pipeline > 1:
        [words] = spec.mappings.embedding
        last = layout.pipeline - 1
        add(Entry(words, last, layout.chunks - 1, "output_layer.weight", words.hf, None), last, -1)
    stages: list[StageParameters] = []
    for stage in range(layout.pipeline):
        held = tuple(Shapes(tuple(dense), tuple(expert)) for dense, expert in weights[stage])
        added = tuple(Shapes(tuple(dense), tuple(expert)) for dense, expert in adapters[stage])
        stages.append(StageParameters(held, held if lora is None else added, buffers[stage]))
    return stages


def _is_adapted(entry: Entry, lora: LoraConfig) -> bool:
    module, _, kind = entry.parameter.rpartition(".")
    layer = module.rpartition(".")[2]
    if kind != "weight" or not layer.startswith("linear_"):
        return False
    return lora.targets is None or layer in lora.targets


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
