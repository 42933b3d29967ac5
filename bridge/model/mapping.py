"""The terms in which a family maps Megatron parameters to HF tensors.

A *split* states which part of which HF tensor is where in a rank's shard, as ``Piece`` objects, and nothing
else: it fixes neither arithmetic nor an order of reading and writing. Loading copies along the pieces in one
direction and export in the other, so a round trip is bit-exact: both follow the same description, and both
only copy.

Plans and checks use this module without torch, so it is not imported here; tensors come in as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol, cast

from slipstream.bridge.model.layout import LayerSpec, Shard

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A part of one HF tensor, and its place in a shard.

    Along ``dim``, the range ``start`` to ``stop`` of the HF tensor consists of ``groups`` runs of equal
    length. The shard consists of as many groups along the same dimension, and each run begins at ``offset``
    in its group.
    """

    hf: int
    """Index of the HF tensor among the parameter's."""
    start: int
    stop: int
    dim: int = 0
    groups: int = 1
    offset: int = 0

    def in_hf(self, tensor: Tensor) -> Tensor:
        """Return a view of the HF tensor: [groups, run, ...] along ``dim``."""
        return _grouped(tensor.narrow(self.dim, self.start, self.stop - self.start), self.dim, self.groups)

    def in_shard(self, tensor: Tensor) -> Tensor:
        """Return a view of the shard, with the shape and the order of ``in_hf``."""
        run = (self.stop - self.start) // self.groups
        if self.groups == 1:
            return _grouped(tensor.narrow(self.dim, self.offset, run), self.dim, 1)
        return _grouped(tensor, self.dim, self.groups).narrow(self.dim + 1, self.offset, run)


def _grouped(tensor: Tensor, dim: int, groups: int) -> Tensor:
    # torch does not annotate the result of this method.
    return cast("Tensor", tensor.unflatten(dim, (groups, -1)))


class Split(Protocol):
    """How the ranks of a tensor-parallel group share a parameter."""

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the HF tensors that the parameter holds."""
        ...

    def shard_shape(self, size: int) -> Shape:
        """Return the shape of one of ``size`` shards."""
        ...

    def pieces(self, shard: Shard) -> tuple[Piece, ...]:
        """Return the pieces of HF tensors in a shard. Raises UnevenSplit."""
        ...


@dataclass(frozen=True)
class Whole:
    """Every rank holds the whole parameter; the first rank exports it."""

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
    """[rows, columns], split along the rows: Megatron's column-parallel linear layer, or its bias.

    Several HF tensors are fused unit by unit: a unit holds an equal share of the rows of each tensor, and a
    rank holds whole units.
    """

    rows: tuple[int, ...]
    """Rows of each HF tensor."""
    columns: int | None
    """None: the parameter is a vector."""
    units: int | None = None
    """Key-value groups for fused query, key and value. None: each rank is one unit, as for gate and up."""
    label: str = "rows"
    """Name of what ranks share, for error messages."""

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return tuple((rows,) if self.columns is None else (rows, self.columns) for rows in self.rows)

    def shard_shape(self, size: int) -> Shape:
        rows = sum(self.rows) // size
        return (rows,) if self.columns is None else (rows, self.columns)

    def pieces(self, shard: Shard) -> tuple[Piece, ...]:
        units = self.units or shard.size
        shard.range_of(units, self.label)
        ranges = [shard.range_of(rows, self.label) for rows in self.rows]
        groups = units // shard.size if len(self.rows) > 1 else 1
        offsets = accumulate((rows // units for rows in self.rows), initial=0)
        return tuple(
            Piece(hf, *range_, groups=groups, offset=offset)
            for hf, (range_, offset) in enumerate(zip(ranges, offsets, strict=False))
        )


@dataclass(frozen=True)
class Vocabulary:
    """[vocabulary, hidden], split along the rows; Megatron adds rows of zeros to make the split even."""

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
    """[rows, columns], split along the columns: Megatron's row-parallel linear layer."""

    rows: int
    columns: int
    label: str = "columns"
    """Name of what ranks share, for error messages."""

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return ((self.rows, self.columns),)

    def shard_shape(self, size: int) -> Shape:
        return (self.rows, self.columns // size)

    def pieces(self, shard: Shard) -> tuple[Piece, ...]:
        if shard.size == 1:
            return (Piece(0, 0, self.rows),)
        return (Piece(0, *shard.range_of(self.columns, self.label), dim=1),)


@dataclass(frozen=True)
class Mapping:
    """One Megatron parameter and the HF tensors that it holds.

    In names, ``{layer}`` stands for the number of the layer and ``{expert}`` for the number of the expert. A
    Megatron name counts the layers of the model chunk and the experts of the rank; an HF name counts all.
    """

    megatron: str
    hf: tuple[str, ...]
    split: Split
    te: str | None = None
    """Megatron's name under its Transformer Engine layer spec, if it differs."""
    per_expert: bool = False
    """Every expert has such a parameter; expert-parallel ranks hold different experts."""
    float32: bool = False
    """The parameter stays in single precision, whatever the model's dtype is."""
    optional: bool = False
    """A checkpoint may lack the tensors; the parameter then keeps its initial value."""

    def name(self, spec: LayerSpec) -> str:
        return self.te if self.te and spec == "transformer_engine" else self.megatron


@dataclass(frozen=True)
class Mappings:
    """All parameters of a model: before the decoder, in each layer, after the decoder."""

    embedding: tuple[Mapping, ...]
    layers: tuple[tuple[Mapping, ...], ...]
    head: tuple[Mapping, ...]


def copy_in(target: Tensor, sources: Sequence[Tensor], pieces: Sequence[Piece]) -> None:
    """Fill a shard from its HF tensors. Elements that no piece covers are padding and become zero."""
    views = [(piece.in_shard(target), piece.in_hf(sources[piece.hf])) for piece in pieces]
    if sum(view.numel() for view, _ in views) < target.numel():
        target.zero_()
    for view, source in views:
        view.copy_(source)
