"""The order in which shards leave the trainer. Imports no torch and needs no process groups.

    mappings of the model + layout  ->  ExportPlan (ordered buckets)

Every rank computes the same plan and follows it in the same order, so sends and receives match. A parameter
travels straight from the ranks that hold its shards to the sender. A rank that holds nothing of a bucket does
nothing for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from math import prod

from slipstream.bridge.model.layout import Coordinates, Layout, Place, Shard, UnevenSplit
from slipstream.bridge.model.mapping import Mapping, Piece, Shape, Split, Whole
from slipstream.bridge.model.spec import ModelSpec

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

    @property
    def split(self) -> Split:
        return self.mapping.split

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return self.split.hf_shapes

    @property
    def numel(self) -> int:
        return _numel(self.split)


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
    def hf_names(self) -> tuple[str, ...]:
        return tuple(name for entry in self.entries for name in entry.hf_names)

    @cached_property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return tuple(shape for entry in self.entries for shape in entry.hf_shapes)

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
    """Shape of the HF tensor."""
    offset: int
    """First element of that tensor in the flat bucket."""

    @property
    def numel(self) -> int:
        return (self.piece.stop - self.piece.start) * (prod(self.shape) // self.shape[self.piece.dim])

    @property
    def in_place(self) -> bool:
        """True if the part is one contiguous run of the HF tensor, which can be received where it belongs."""
        return self.piece.dim == 0


@dataclass(frozen=True)
class ExportPlan:
    spec: ModelSpec
    layout: Layout
    buckets: tuple[Bucket, ...]
    bucket_numel: int
    """Largest number of elements of a bucket, unless a single parameter has more."""

    def parts(self, bucket: Bucket) -> Iterator[TensorPart]:
        """Yield the parts in the order in which both sides process them."""
        offset = 0
        for entry in bucket.entries:
            shapes = entry.hf_shapes
            offsets = list(accumulate(map(prod, shapes), initial=offset))
            for owner, pieces in self._owners(entry):
                for piece in pieces:
                    yield TensorPart(entry, owner, piece, shapes[piece.hf], offsets[piece.hf])
            offset = offsets[-1]

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


def entries(spec: ModelSpec, layout: Layout) -> Iterator[Entry]:
    """Yield every parameter of the model, in the order of the forward pass. Raises UnevenSplit."""
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
    mapping: Mapping, layout: Layout, layer: int, place: Place, expert: tuple[int, int, int] | None = None
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
        yield _of_layer(mapping, layout, layer, place, (number, local, rank))


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
        yield Entry(words, last, chunk, "output_layer.weight", words.hf, None), dense


def _in_turns(forward: Sequence[Entry], stages: int) -> Iterator[Entry]:
    """Keep the order within each stage; the next stage is the one with the smallest share yielded so far."""
    if stages == 1:
        yield from forward
        return
    queues = [[entry for entry in forward if entry.stage == stage] for stage in range(stages)]
    totals = [max(sum(entry.numel for entry in queue), 1) for queue in queues]
    turns = [(0.0, stage, 0) for stage in range(stages) if queues[stage]]
    while turns:
        share, stage, number = heappop(turns)
        entry = queues[stage][number]
        yield entry
        if number + 1 < len(queues[stage]):
            heappush(turns, (share + entry.numel / totals[stage], stage, number + 1))


def make_plan(spec: ModelSpec, layout: Layout, bucket_bytes: int, itemsize: int) -> ExportPlan:
    """Divide the model into buckets. Raises UnevenSplit.

    Two buckets and the staging memory together take at most twice ``bucket_bytes``, unless a single parameter
    is larger, which has a bucket to itself. Pipeline stages take turns, so that several ranks send at a time
    while the sender copies its own shards.
    """
    buckets: list[Bucket] = []
    pending: list[Entry] = []
    single_precision: list[Entry] = []
    size, room = 0, bucket_bytes - bucket_bytes // (2 * STAGING_DIVISOR)
    for entry in _in_turns(list(entries(spec, layout)), layout.pipeline):
        if entry.mapping.float32 and itemsize != 4:
            single_precision.append(entry)
            continue
        entry_bytes = entry.numel * itemsize
        if pending and size + entry_bytes > room:
            buckets.append(Bucket(tuple(pending), float32=False))
            pending, size = [], 0
        pending.append(entry)
        size += entry_bytes
    if pending:
        buckets.append(Bucket(tuple(pending), float32=False))
    if single_precision:
        buckets.append(Bucket(tuple(single_precision), float32=True))
    return ExportPlan(spec, layout, tuple(buckets), bucket_bytes // itemsize)
