"""The order in which shards leave the trainer. Imports no torch and needs no process groups.

    mappings of the model + layout  ->  ExportPlan (ordered buckets)

Every rank computes the same plan and follows it in the same order, so sends and receives match. A parameter
travels straight from the ranks that hold its shards to the sender. A rank that holds nothing of a bucket does
nothing for it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import accumulate, groupby
from math import prod
from typing import TYPE_CHECKING

from slipstream.bridge.model.layout import Coordinates, Layout, Place, Shard, UnevenSplit
from slipstream.bridge.model.mapping import OUTPUT, Mapping, Piece, Shape, Split, Whole
from slipstream.bridge.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

SENDER = 0
"""The rank that collects the exported tensors."""

STAGING_DIVISOR = 8
"""Parts that cannot be received in place are staged in at most 1/STAGING_DIVISOR of a bucket's memory."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter of the model and the HF tensors that it holds."""

    mapping: Mapping
    stage: int
    chunk: int
    parameter: str
    """Name inside the model chunk; layers are counted from the first one of the chunk."""
    hf_names: tuple[str, ...]
    expert: int | None
    """Expert-parallel rank that holds the parameter; None: it belongs to no expert."""
    stacked: tuple[int, int] | None = None
    """Number of the expert, and of all experts, if each HF tensor stacks their parameters."""

    @property
    def split(self) -> Split:
        return self.mapping.split

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        shapes = self.split.hf_shapes
        return shapes if self.stacked is None else tuple((self.stacked[1], *shape) for shape in shapes)

    @property
    def numel(self) -> int:
        """Elements of the parameter, and of its share of HF tensors that stack experts."""
        return _numel(self.split)

    def own_part(self, tensor: "Tensor") -> "Tensor":
        """Return the view of an HF tensor that the parameter's pieces are about."""
        return tensor if self.stacked is None else tensor.select(0, self.stacked[0])


@lru_cache
def _numel(split: Split) -> int:
    return sum(map(prod, split.hf_shapes))


@lru_cache
def pieces_of(split: Split, shard: Shard) -> tuple[Piece, ...]:
    """Return ``split.pieces(shard)``, which is the same for all layers of a kind. Raises UnevenSplit."""
    return split.pieces(shard)


@dataclass(frozen=True)
class Bucket:
    """Consecutive entries of one dtype that are gathered and sent together."""

    entries: tuple[Entry, ...]
    float32: bool
    """The bucket is in single precision although the model is not."""

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        """The shapes of the bucket's HF tensors by name. The entries of stacked experts share theirs."""
        return {
            name: shape
            for entry in self.entries
            for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)
        }

    @cached_property
    def hf_names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    @cached_property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return tuple(self._shapes.values())

    @cached_property
    def numel(self) -> int:
        return sum(entry.numel for entry in self.entries)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The piece of one HF tensor that one rank holds, and its destination."""

    entry: Entry
    owner: int
    piece: Piece
    shape: Shape
    """Shape of the HF tensor, or of one expert's share of it."""
    offset: int
    """First element of that tensor, or share, in the flat bucket."""

    @property
    def numel(self) -> int:
        return self.piece.length * (prod(self.shape) // self.shape[self.piece.hf_dim])

    @property
    def in_place(self) -> bool:
        """True if the part is one contiguous run of the HF tensor, which can be received where it belongs."""
        return self.piece.is_contiguous


@dataclass(frozen=True)
class ExportPlan:
    spec: ModelSpec
    layout: Layout
    buckets: tuple[Bucket, ...]
    bucket_numel: int
    """Largest number of elements of a bucket, unless a single parameter has more."""

    def parts(self, bucket: Bucket) -> Iterator[TensorPart]:
        """Yield the parts in the order in which both sides process them."""
        starts = accumulate(map(prod, bucket.hf_shapes), initial=0)
        start_of = dict(zip(bucket.hf_names, starts, strict=False))
        for entry in bucket.entries:
            number = entry.stacked[0] if entry.stacked else 0
            for owner, pieces in self._owners(entry):
                for piece in pieces:
                    shape = entry.split.hf_shapes[piece.hf]
                    offset = start_of[entry.hf_names[piece.hf]] + number * prod(shape)
                    yield TensorPart(entry, owner, piece, shape, offset)

    def rounds(self, bucket: Bucket) -> Iterator[list[TensorPart]]:
        """Yield the parts in groups whose staged parts fit into the staging memory."""
        parts: list[TensorPart] = []
        staged = 0
        for part in self.parts(bucket):
            if part.owner != SENDER and not part.in_place:
                staged += part.numel
                if parts and staged > self.bucket_numel // STAGING_DIVISOR:
                    yield parts
                    parts, staged = [], part.numel
            parts.append(part)
        yield parts

    def _owners(self, entry: Entry) -> list[tuple[int, tuple[Piece, ...]]]:
        """Return the ranks that export the entry, each with its pieces of the HF tensors."""
        owners = self.layout.owners(entry.stage, expert=entry.expert)
        if isinstance(entry.split, Whole):
            return [(owners[0], pieces_of(entry.split, Shard(0, 1)))]
        size = len(owners)
        return [(owner, pieces_of(entry.split, Shard(rank, size))) for rank, owner in enumerate(owners)]


@lru_cache(maxsize=4)  # a plan of one recipe asks five times: 20,000 entries and more of a large model
def entries(spec: ModelSpec, layout: Layout) -> tuple[Entry, ...]:
    """Return every parameter of the model, in the order of the forward pass. Raises UnevenSplit."""
    return tuple(_entries(spec, layout))


def _entries(spec: ModelSpec, layout: Layout) -> Iterator[Entry]:
    layout.check()
    geometry, mappings = spec.geometry, spec.mappings
    last = layout.pipeline - 1

    def entry(mapping: Mapping, stage: int, chunk: int) -> Entry:
        return Entry(mapping, stage, chunk, mapping.name(layout.layer_spec), mapping.hf, None)

    yield from (entry(mapping, 0, 0) for mapping in mappings.embedding)
    places = layout.places(geometry.n_layers)
    for layer, (place, layer_mappings) in enumerate(zip(places, mappings.layers, strict=True)):
        for mapping in layer_mappings:
            if mapping.per_expert:
                yield from _experts(mapping, spec, layout, layer, place)
            else:
                yield _of_layer(mapping, layout, layer, place)
    yield from (entry(mapping, last, layout.chunks - 1) for mapping in mappings.head)


def _of_layer(
    mapping: Mapping,
    layout: Layout,
    layer: int,
    place: Place,
    expert: tuple[int, int, int] | None = None,
    stacked: tuple[int, int] | None = None,
) -> Entry:
    """``expert``: its number, its number on its rank, and its expert-parallel rank."""
    number, local, rank = expert or ("", "", None)
    return Entry(
        mapping,
        place.stage,
        place.chunk,
        mapping.name(layout.layer_spec).format(layer=place.layer, expert=local),
        tuple(hf.format(layer=layer, expert=number) for hf in mapping.hf),
        rank,
        stacked,
    )


def _experts(mapping: Mapping, spec: ModelSpec, layout: Layout, layer: int, place: Place) -> Iterator[Entry]:
    experts = spec.geometry.experts
    assert experts is not None
    per_rank, remainder = divmod(experts.count, layout.expert)
    if remainder:
        raise UnevenSplit(
            f"{experts.count} experts cannot be split evenly over {layout.expert} expert-parallel ranks; "
            "choose actor.parallel.expert as a divisor"
        )
    for number in range(experts.count):
        rank, local = divmod(number, per_rank)
        stacked = (number, experts.count) if mapping.stacked else None
        yield _of_layer(mapping, layout, layer, place, (number, local, rank), stacked)


def entries_of(spec: ModelSpec, layout: Layout, rank: int) -> Iterator[tuple[Entry, Shard]]:
    """Yield the parameters that ``rank`` of any replica holds, each with the shard of it.

    The last pipeline stage holds a copy of a tied embedding.
    """
    place = Coordinates.of(rank, layout)
    dense, expert = Shard(place.tensor, layout.tensor), Shard(place.expert_tensor, layout.etp)
    last = layout.pipeline - 1
    for entry in entries(spec, layout):
        if entry.stage == place.stage and entry.expert in (None, place.expert):
            yield entry, dense if entry.expert is None else expert
    if spec.geometry.tied_embeddings and place.stage == last > 0:
        [words] = spec.mappings.embedding
        chunk = layout.chunks - 1
        yield Entry(words, last, chunk, OUTPUT, words.hf, None), dense


def _units(forward: Iterable[Entry]) -> Iterator[tuple[Entry, ...]]:
    """Yield the entries that share HF tensors, which are in the same bucket: one, or those of all experts."""
    for _, unit in groupby(forward, key=lambda entry: entry.hf_names):
        yield tuple(unit)


def _size(unit: Sequence[Entry]) -> int:
    return sum(entry.numel for entry in unit)


def _in_turns(forward: Sequence[tuple[Entry, ...]], stages: int) -> Iterator[tuple[Entry, ...]]:
    """Keep the order within each stage; the next stage is the one with the smallest share yielded so far."""
    if stages == 1:
        yield from forward
        return
    queues = [[unit for unit in forward if unit[0].stage == stage] for stage in range(stages)]
    totals = [max(sum(map(_size, queue)), 1) for queue in queues]
    turns = [(0.0, stage, 0) for stage in range(stages) if queues[stage]]
    while turns:
        share, stage, number = heappop(turns)
        unit = queues[stage][number]
        yield unit
        if number + 1 < len(queues[stage]):
            heappush(turns, (share + _size(unit) / totals[stage], stage, number + 1))


def make_plan(spec: ModelSpec, layout: Layout, bucket_bytes: int, itemsize: int) -> ExportPlan:
    """Divide the model into buckets. Raises UnevenSplit.

    Two buckets and the staging memory together take at most twice ``bucket_bytes``, unless a single parameter
    or tensor is larger, which has a bucket to itself. Pipeline stages take turns, so that several ranks send
    at a time while the sender copies its own shards.
    """
    buckets: list[Bucket] = []
    pending: list[Entry] = []
    single_precision: list[Entry] = []
    size, room = 0, bucket_bytes - bucket_bytes // (2 * STAGING_DIVISOR)
    for unit in _in_turns(list(_units(entries(spec, layout))), layout.pipeline):
        if unit[0].mapping.float32 and itemsize != 4:
            single_precision += unit
            continue
        unit_bytes = _size(unit) * itemsize
        if pending and size + unit_bytes > room:
            buckets.append(Bucket(tuple(pending), float32=False))
            pending, size = [], 0
        pending += unit
        size += unit_bytes
    if pending:
        buckets.append(Bucket(tuple(pending), float32=False))
    if single_precision:
        buckets.append(Bucket(tuple(single_precision), float32=True))
    return ExportPlan(spec, layout, tuple(buckets), bucket_bytes // itemsize)
