"""What is exported, in which order, in which buckets. Pure: no tensors, no process groups, no torch.

    family mappings + layout  ->  ExportPlan (ordered buckets)

Every rank computes the same plan and walks it in the same order, which is what keeps sends and receives
matched. A parameter goes straight from the ranks that hold its shards to the sender, and a rank that holds
nothing of a bucket has nothing to do with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from math import prod

from slipstream.bridge.families import ModelSpec
from slipstream.bridge.layout import Coordinates, Layout, Place, Shard, UnevenSplit
from slipstream.bridge.mapping import Mapping, Piece, Shape, Split, Whole

SENDER = 0
"""The rank that collects what is exported."""

STAGED = 8
"""Parts that cannot be received in place may need this fraction of a bucket besides, at one time."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter and the HF tensors that it becomes."""

    mapping: Mapping
    stage: int
    chunk: int
    parameter: str
    """Name inside the model chunk; layers are counted from the first of the chunk."""
    hf_names: tuple[str, ...]
    expert: int | None
    """The expert-parallel rank that has it; None: it is no expert's."""

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
    """``split.pieces``; the layers of a model ask for the same ones again and again."""
    return split.pieces(shard)


@dataclass(frozen=True)
class Bucket:
    """Consecutive entries that are gathered and sent together, of one dtype."""

    entries: tuple[Entry, ...]
    float32: bool
    """In single precision, which is not the model's dtype."""

    @cached_property
    def hf_names(self) -> tuple[str, ...]:
        return tuple(name for entry in self.entries for name in entry.hf_names)

    @cached_property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return tuple(shape for entry in self.entries for shape in entry.hf_shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each entry begins in the flat bucket, in elements."""
        return tuple(accumulate((entry.numel for entry in self.entries), initial=0))

    @property
    def numel(self) -> int:
        return self.offsets[-1]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has of one HF tensor, and where it goes."""

    entry: Entry
    owner: int
    piece: Piece
    shape: Shape
    """Of the HF tensor."""
    offset: int
    """Where that tensor begins in the flat bucket, in elements."""

    @property
    def numel(self) -> int:
        return (self.piece.stop - self.piece.start) * (prod(self.shape) // self.shape[self.piece.dim])

    @property
    def in_place(self) -> bool:
        """Whether it is one run of the HF tensor's elements."""
        return self.piece.dim == 0


@dataclass(frozen=True)
class ExportPlan:
    spec: ModelSpec
    layout: Layout
    buckets: tuple[Bucket, ...]
    bucket_numel: int
    """What a bucket has room for, unless a single parameter is larger."""

    def parts(self, bucket: Bucket) -> Iterator[Part]:
        """In the order in which both sides go through them."""
        offset = 0
        for entry in bucket.entries:
            sources, shapes = self.sources(entry), entry.hf_shapes
            offsets = list(accumulate(map(prod, shapes), initial=offset))
            for owner, pieces in sources:
                for piece in pieces:
                    yield Part(entry, owner, piece, shapes[piece.hf], offsets[piece.hf])
            offset = offsets[-1]

    def rounds(self, bucket: Bucket) -> Iterator[list[Part]]:
        """The parts, as many at a time as need little memory besides their place."""
        taken: list[Part] = []
        staged = 0
        for part in self.parts(bucket):
            if part.owner != SENDER and not part.in_place:
                staged += part.numel
                if taken and staged > self.bucket_numel // STAGED:
                    yield taken
                    taken, staged = [], part.numel
            taken.append(part)
        yield taken

    def sources(self, entry: Entry) -> list[tuple[int, tuple[Piece, ...]]]:
        """Which rank has which pieces of the entry's HF tensors."""
        owners = self.layout.owners(entry.stage, expert=entry.expert)
        if isinstance(entry.split, Whole):
            return [(owners[0], pieces_of(entry.split, Shard(0, 1)))]
        size = len(owners)
        return [(owner, pieces_of(entry.split, Shard(rank, size))) for rank, owner in enumerate(owners)]


def entries(spec: ModelSpec, layout: Layout) -> Iterator[Entry]:
    """Every parameter of the model, in the order of the forward pass. Raises UnevenSplit."""
    layout.check()
    geometry, mappings = spec.geometry, spec.mappings
    last = layout.pipeline - 1

    def entry(mapping: Mapping, stage: int, chunk: int) -> Entry:
        return Entry(mapping, stage, chunk, mapping.name(layout.layer_spec), mapping.hf, None)

    yield from (entry(mapping, 0, 0) for mapping in mappings.embedding)
    places = layout.places(geometry.n_layers)
    for layer, (place, found) in enumerate(zip(places, mappings.layers, strict=True)):
        for mapping in found:
            if mapping.of_expert:
                yield from _experts(mapping, spec, layout, layer, place)
            else:
                yield _of_layer(mapping, layout, layer, place)
    yield from (entry(mapping, last, layout.chunks - 1) for mapping in mappings.head)


def _of_layer(
    mapping: Mapping, layout: Layout, layer: int, place: Place, expert: tuple[int, int, int] | None = None
) -> Entry:
    """``expert``: its number, its number on its rank, and its rank."""
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
    per_rank, left = divmod(experts.count, layout.expert)
    if left:
        raise UnevenSplit(
            f"{experts.count} experts cannot be split evenly over {layout.expert} expert-parallel ranks; "
            "choose actor.parallel.expert as a divisor"
        )
    for number in range(experts.count):
        rank, local = divmod(number, per_rank)
        yield _of_layer(mapping, layout, layer, place, (number, local, rank))


def entries_of(spec: ModelSpec, layout: Layout, rank: int) -> Iterator[tuple[Entry, Shard]]:
    """The parameters that ``rank`` holds (of whichever replica), and which of their shards.

    The last pipeline stage has a copy of a tied embedding of its own.
    """
    at = Coordinates.of(rank, layout)
    dense, expert = Shard(at.tensor, layout.tensor), Shard(at.expert_tensor, layout.etp)
    last = layout.pipeline - 1
    for entry in entries(spec, layout):
        if entry.stage == at.stage and entry.expert in (None, at.expert):
            yield entry, dense if entry.expert is None else expert
    if spec.geometry.tied_embeddings and at.stage == last > 0:
        [words] = spec.mappings.embedding
        chunk = layout.chunks - 1
        yield Entry(words, last, chunk, "output_layer.weight", words.hf, None), dense


def _in_turns(found: list[Entry], stages: int) -> Iterator[Entry]:
    """Each stage's in their order; next is always the stage of which the smallest part has been."""
    if stages == 1:
        yield from found
        return
    queues = [[entry for entry in found if entry.stage == stage] for stage in range(stages)]
    totals = [max(sum(entry.numel for entry in queue), 1) for queue in queues]
    turns = [(0.0, stage, 0) for stage in range(stages) if queues[stage]]
    while turns:
        done, stage, number = heappop(turns)
        entry = queues[stage][number]
        yield entry
        if number + 1 < len(queues[stage]):
            heappush(turns, (done + entry.numel / totals[stage], stage, number + 1))


def make_plan(spec: ModelSpec, layout: Layout, bucket_bytes: int, itemsize: int) -> ExportPlan:
    """Buckets of which two, and what is staged, take at most twice ``bucket_bytes`` (but a single larger
    parameter has a bucket of its own).

    Pipeline stages take turns, so that several ranks send at a time while the sender copies what is its own.
    """
    buckets: list[Bucket] = []
    pending: list[Entry] = []
    single: list[Entry] = []
    size, room = 0, bucket_bytes - bucket_bytes // (2 * STAGED)
    for entry in _in_turns(list(entries(spec, layout)), layout.pipeline):
        if entry.mapping.float32 and itemsize != 4:
            single.append(entry)
            continue
        added = entry.numel * itemsize
        if pending and size + added > room:
            buckets.append(Bucket(tuple(pending), float32=False))
            pending, size = [], 0
        pending.append(entry)
        size += added
    if pending:
        buckets.append(Bucket(tuple(pending), float32=False))
    if single:
        buckets.append(Bucket(tuple(single), float32=True))
    return ExportPlan(spec, layout, tuple(buckets), bucket_bytes // itemsize)
