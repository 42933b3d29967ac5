"""Which rank of the trainer sends what to which rank of an engine. Imports no torch and needs no processes.

A rank compiles only what it sends itself. The copies of a shard share the work: data-parallel copies take
turns over the engines, or over the layers if there are more copies than engines; tensor-parallel ranks that
hold the same parameter (a norm) take turns over the ranks of an engine.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, cast

from slipstream.bridge.model.layout import Coordinates, Layout, Shard
from slipstream.bridge.model.mapping import OUTPUT, Shape, Whole
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.plan import Entry, entries_of, pieces_of
from slipstream.bridge.shards.regions import (
    Message,
    Move,
    Region,
    Strides,
    contiguous,
    meet,
    messages,
)

if TYPE_CHECKING:
    from torch import Tensor

Table = Mapping[str, Sequence[Region]]
"""The regions of one engine rank by HF name."""


@dataclass(frozen=True)
class EngineSeat:
    """The place of an engine among the engines, by which copies of a shard take turns."""

    number: int
    count: int


@dataclass(frozen=True)
class OwnRegion:
    """A region that a trainer rank holds, and its turn among the ranks that hold the same elements."""

    region: Region
    unit: int
    """Number of the parameter among the rank's. Copies take turns over the units."""
    expert: bool
    float32: bool
    """The elements are in single precision, whatever the model's dtype is."""
    turn: int
    turns: int
    """Number of tensor-parallel ranks that hold the same elements, and the number of this rank among them."""


def tensor_name(chunk: int, parameter: str) -> str:
    """Return the name of a trainer rank's tensor in regions and moves."""
    return f"{chunk}/{parameter}"


def indexed(regions: Iterable[Region]) -> Table:
    table: defaultdict[str, list[Region]] = defaultdict(list)
    for region in regions:
        table[region.hf].append(region)
    return dict(table)


def own_regions(spec: ModelSpec, layout: Layout, rank: int) -> Iterator[OwnRegion]:
    """Yield all that ``rank`` holds, without the last stage's copy of a tied embedding."""
    place = Coordinates.of(rank, layout)
    for unit, (entry, shard) in enumerate(entries_of(spec, layout, rank)):
        if entry.parameter == OUTPUT and entry.mapping.megatron != OUTPUT:
            continue
        whole, expert = isinstance(entry.split, Whole), entry.expert is not None
        shard = Shard(0, 1) if whole else shard
        regions = regions_of(entry, shard)
        turn, turns = (place.expert_tensor, layout.etp) if expert else (place.tensor, layout.tensor)
        for region in regions:
            yield OwnRegion(
                region, unit, expert, entry.mapping.float32, *((turn, turns) if whole else (0, 1))
            )


class _View(NamedTuple):
    """A strided view of a tensor without elements, with the methods by which pieces make views."""

    shape: Shape
    stride: Strides
    offset: int

    @classmethod
    def of(cls, shape: Shape) -> "_View":
        return cls(shape, contiguous(shape), 0)

    def narrow(self, dim: int, start: int, length: int) -> "_View":
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return self._replace(shape=shape, offset=self.offset + start * self.stride[dim])

    def select(self, dim: int, index: int) -> "_View":
        shape, stride = ((*numbers[:dim], *numbers[dim + 1 :]) for numbers in (self.shape, self.stride))
        return _View(shape, stride, self.offset + index * self.stride[dim])

    def unflatten(self, dim: int, sizes: tuple[int, int]) -> "_View":
        outer = sizes[0]
        inner = self.shape[dim] // outer
        step = self.stride[dim]
        return self._replace(
            shape=(*self.shape[:dim], outer, inner, *self.shape[dim + 1 :]),
            stride=(*self.stride[:dim], inner * step, step, *self.stride[dim + 1 :]),
        )

    def transpose(self, dim0: int, dim1: int) -> "_View":
        order = list(range(len(self.shape)))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return _View(
            tuple(self.shape[dim] for dim in order), tuple(self.stride[dim] for dim in order), self.offset
        )


class _Axis(NamedTuple):
    """A dimension of a piece that is longer than 1."""

    dim: int
    """Dimension of the HF tensor along which it runs."""
    step: int
    """Elements of that dimension from one to the next."""
    length: int
    own_step: int
    """Elements of the shard from one to the next."""


def regions_of(entry: Entry, shard: Shard) -> Iterator[Region]:
    """Yield the regions of one trainer shard."""
    name, shard_shape = tensor_name(entry.chunk, entry.parameter), entry.split.shard_shape(shard.size)
    for piece in pieces_of(entry.split, shard):
        shape = entry.hf_shapes[piece.hf]
        whole, part = cast("Tensor", _View.of(shape)), cast("Tensor", _View.of(shard_shape))
        in_hf = cast(_View, piece.in_hf(entry.own_part(whole)))
        own = cast(_View, piece.in_shard(part))
        axes = _axes(shape, in_hf, own)
        first: list[int] = []
        rest = in_hf.offset
        for step, length in zip(contiguous(shape), shape, strict=True):
            first.append(rest // step if length > 1 else 0)
            rest -= first[-1] * step
        # A rectangle takes one axis of each dimension, that of the smallest step; others are gone through.
        inside = {axis.dim: axis for axis in sorted(axes, key=lambda axis: -axis.step)}
        around = [axis for axis in axes if axis is not inside[axis.dim]]
        taken = [inside.get(dim, _Axis(dim, 1, 1, 0)) for dim in range(len(shape))]
        size = tuple(axis.length for axis in taken)
        stride = tuple(axis.own_step for axis in taken)
        steps = tuple(axis.step for axis in taken)
        for place in product(*(range(axis.length) for axis in around)):
            start, offset = list(first), own.offset
            for number, axis in zip(place, around, strict=True):
                start[axis.dim] += number * axis.step
                offset += number * axis.own_step
            yield Region(entry.hf_names[piece.hf], tuple(start), size, name, offset, stride, steps)


def _axes(shape: Shape, in_hf: _View, own: _View) -> list[_Axis]:
    """Return the axes of a piece. Two that follow each other in both tensors are one."""
    steps = contiguous(shape)
    axes: list[_Axis] = []
    for length, step, own_step in zip(in_hf.shape, in_hf.stride, own.stride, strict=True):
        if length == 1:
            continue
        dim = next(dim for dim, n in enumerate(shape) if n > 1 and step % steps[dim] == 0)
        axis = _Axis(dim, step // steps[dim], length, own_step)
        if axes and axes[-1].dim == dim:
            outer = axes[-1]
            if (outer.step, outer.own_step) == (length * axis.step, length * own_step):
                axes[-1] = axis._replace(length=outer.length * length)
                continue
        axes.append(axis)
    return axes


class Sends:
    """The messages of one trainer rank to the engines. Engines with equal tables are compiled once."""

    def __init__(self, spec: ModelSpec, layout: Layout, rank: int, *, packed: int, direct: int) -> None:
        """``packed`` and ``direct``: as in ``messages``."""
        self._own = list(own_regions(spec, layout, rank))
        self._copies = {expert: _copy_of(layout, rank, expert=expert) for expert in (False, True)}
        self._packed, self._direct = packed, direct
        self._compiled: dict[tuple[tuple[str, ...], EngineSeat], dict[int, list[Message]]] = {}

    def to_engine(
        self, digests: Sequence[str], tables: Mapping[str, Table], seat: EngineSeat
    ) -> Mapping[int, Sequence[Message]]:
        """Return the messages to each rank of an engine that gets any.

        ``digests``: that of each engine rank's table; ``tables``: the tables by digest.
        """
        key = (tuple(digests), self._shift(seat))
        if key not in self._compiled:
            self._compiled[key] = self._compile(digests, tables, seat)
        return self._compiled[key]

    def forget(self) -> None:
        """Forget what was compiled: the engines are others now."""
        self._compiled.clear()

    def _shift(self, seat: EngineSeat) -> EngineSeat:
        """Return a seat that stands for all seats that get the same from this rank."""
        if all(seat.count >= copies for _, copies in self._copies.values()):
            serving = tuple(seat.number % copies == copy for copy, copies in self._copies.values())
            return EngineSeat(2 * serving[0] + serving[1], 0)
        return seat

    def _compile(
        self, digests: Sequence[str], tables: Mapping[str, Table], seat: EngineSeat
    ) -> dict[int, list[Message]]:
        serving = [own for own in self._own if _serves(*self._copies[own.expert], seat, own.unit)]
        result: dict[int, list[Message]] = {}
        for engine_rank, digest in enumerate(digests):
            # A message has elements of one dtype.
            for float32 in (False, True):
                of_dtype = [own for own in serving if own.float32 is float32]
                if moves := list(_moves(of_dtype, engine_rank, tables[digest])):
                    result.setdefault(engine_rank, []).extend(
                        messages(moves, packed=self._packed, direct=self._direct)
                    )
        return result


def _moves(serving: Iterable[OwnRegion], engine_rank: int, table: Table) -> Iterator[Move]:
    for own in serving:
        if own.turns == 1 or (engine_rank + own.unit) % own.turns == own.turn:
            for target in table.get(own.region.hf, ()):
                move = meet(own.region, target)
                if move is not None:
                    yield move


def most_sent(layout: Layout, engines: int, *, expert: bool) -> float:
    """Return how often the busiest rank sends its shards in one version, on average over its parameters.

    ``expert``: the shards of experts, whose copies are others. Copies take turns as ``_serves`` says.
    """
    copies = _copy_of(layout, 0, expert=expert)[1]
    return -(-engines // copies) if engines >= copies else 1 / (copies // engines)


def _copy_of(layout: Layout, rank: int, *, expert: bool) -> tuple[int, int]:
    """Return the number of the copy of its shards that a rank holds, and the number of copies."""
    in_stage = layout.tensor * layout.data
    width = layout.expert * layout.etp if expert else layout.tensor
    return rank % in_stage // width, in_stage // width


def _serves(copy: int, copies: int, seat: EngineSeat, unit: int) -> bool:
    """True if a copy sends a unit to the engine on ``seat``."""
    if seat.count >= copies:
        return seat.number % copies == copy
    serving = range(seat.number, copies, seat.count)
    return serving[unit % len(serving)] == copy
