"""How one Megatron parameter relates to HF tensors: the vocabulary that family mappings are written in.

A *split* knows which part of which HF tensor is where in a rank's shard, as ``Piece``s, and nothing else: no
arithmetic, no order of reading or writing. Loading copies along the pieces in one direction, export in the
other, so that a round trip is bit-exact because there is one description and only copies.

Plans and checks need this module without torch, so it is not imported here: tensors come in as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from slipstream.bridge.layout import LayerSpec, Shard

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Part of one HF tensor, and where it is in a shard.

    The HF tensor's ``start`` to ``stop`` along ``dim`` are ``groups`` equal runs. The shard is as many groups
    along the same dimension, and each run is at ``offset`` in its group.
    """

    hf: int
    """Which of the parameter's HF tensors."""
    start: int
    stop: int
    dim: int = 0
    groups: int = 1
    offset: int = 0

    def in_hf(self, tensor: Tensor) -> Tensor:
        """A view of ``tensor``, the HF one: [groups, run, ...] along ``dim``."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start).unflatten(
            self.dim, (self.groups, -1)
        )

    def in_shard(self, tensor: Tensor) -> Tensor:
        """A view of ``tensor``, the shard, of the same shape and order as ``in_hf``."""
        run = (self.stop - self.start) // self.groups
        if self.groups == 1:
            return tensor.narrow(self.dim, self.offset, run).unflatten(self.dim, (1, -1))
        return tensor.unflatten(self.dim, (self.groups, -1)).narrow(self.dim + 1, self.offset, run)


class Split(Protocol):
    """How a parameter is shared by the ranks of a tensor-parallel group."""

    hf_shapes: tuple[Shape, ...]

    def shard_shape(self, size: int) -> Shape: ...

    def pieces(self, shard: Shard) -> tuple[Piece, ...]:
        """What is in a shard. Raises UnevenSplit."""
        ...


@dataclass(frozen=True)
class Whole:
    """Every rank holds all of it; the first one speaks for them."""

    shape: Shape

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (self.shape,)

    def shard_shape(self, size: int) -> Shape:
        return self.shape

    def pieces(self, shard: Shard) -> tuple[Piece, ...]:
        return (Piece(0, 0, self.shape[0]),)


@dataclass(frozen=True)
class Rows:
    """[rows, columns], split over the rows: Megatron's column-parallel linear layer, or its bias.

    Several HF tensors are fused unit by unit: a unit holds its share of the rows of each of them, and ranks
    hold whole units. ``units`` are key-value groups for fused query, key and value; without it each rank is
    one unit, as for gate and up projection.
    """

    rows: tuple[int, ...]
    columns: int | None
    """None: a vector."""
    units: int | None = None
    what: str = "rows"
    """What ranks share, for messages."""

    @cached_property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return tuple((rows,) if self.columns is None else (rows, self.columns) for rows in self.rows)

    def shard_shape(self, size: int) -> Shape:
        rows = sum(self.rows) // size
        return (rows,) if self.columns is None else (rows, self.columns)

    def pieces(self, shard: Shard) -> tuple[Piece, ...]:
        units = self.units or shard.size
        shard.range_of(units, self.what)
        ranges = [shard.range_of(rows, self.what) for rows in self.rows]
        groups = units // shard.size if len(self.rows) > 1 else 1
        offsets = accumulate((rows // units for rows in self.rows), initial=0)
        return tuple(
            Piece(hf, *range_, groups=groups, offset=offset)
            for hf, (range_, offset) in enumerate(zip(ranges, offsets, strict=False))
        )


@dataclass(frozen=True)
class Vocabulary:
    """[vocabulary, hidden], split over the rows; Megatron adds rows of zeros to make the split even."""

    vocab: int
    hidden: int

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return ((self.vocab, self.hidden),)

    def shard_shape(self, size: int) -> Shape:
        return (-(-self.vocab // size), self.hidden)

    def pieces(self, shard: Shard) -> tuple[Piece, ...]:
        rows, _ = self.shard_shape(shard.size)
        start, stop = min(shard.rank * rows, self.vocab), min((shard.rank + 1) * rows, self.vocab)
        return (Piece(0, start, stop),) if stop > start else ()


@dataclass(frozen=True)
class Columns:
    """[rows, columns], split over the columns: Megatron's row-parallel linear layer."""

    rows: int
    columns: int
    what: str = "columns"

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return ((self.rows, self.columns),)

    def shard_shape(self, size: int) -> Shape:
        return (self.rows, self.columns // size)

    def pieces(self, shard: Shard) -> tuple[Piece, ...]:
        if shard.size == 1:
            return (Piece(0, 0, self.rows),)
        return (Piece(0, *shard.range_of(self.columns, self.what), dim=1),)


@dataclass(frozen=True)
class Mapping:
    """One Megatron parameter.

    In names ``{layer}`` stands for the layer's number, and ``{expert}`` for the expert's: in Megatron's among
    those of its rank, in HF's among all.
    """

    megatron: str
    hf: tuple[str, ...]
    split: Split
    te: str | None = None
    """Megatron's name under its Transformer Engine layer spec, where it is another."""
    of_expert: bool = False
    """There is one for each expert; expert-parallel ranks have different ones."""
    float32: bool = False
    """Kept in single precision, whatever the model's dtype is."""
    optional: bool = False
    """A checkpoint may lack it: then it stays as it is."""

    def name(self, spec: LayerSpec) -> str:
        return self.te if self.te and spec == "transformer_engine" else self.megatron


@dataclass(frozen=True)
class Mappings:
    """All parameters of a model: before the decoder, of each layer, after the decoder."""

    embedding: tuple[Mapping, ...]
    layers: tuple[tuple[Mapping, ...], ...]
    head: tuple[Mapping, ...]


def copy_in(target: Tensor, sources: Sequence[Tensor], pieces: Sequence[Piece]) -> None:
    """Fill a shard from its HF tensors. What no piece covers is padding, and zero."""
    views = [(piece.in_shard(target), piece.in_hf(sources[piece.hf])) for piece in pieces]
    if sum(view.numel() for view, _ in views) < target.numel():
        target.zero_()
    for view, source in views:
        view.copy_(source)
