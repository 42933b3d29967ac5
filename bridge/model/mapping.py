"""The terms in which a family maps Megatron parameters to HF tensors.

A *split* states which part of which HF tensor is where in a rank's shard, as ``Piece`` objects, and nothing
else: it fixes neither arithmetic nor an order of reading and writing. Loading copies along the pieces in one
direction and export in the other, so a round trip is bit-exact: both follow the same description, and both
only copy.

Plans and checks use this module without torch, so it is not imported here; tensors come in as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, Protocol, cast

from slipstream.bridge.model.layout import LayerSpec, Shard

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

OUTPUT = "output_layer.weight"
"""Megatron's name of the head."""


def is_attention(hf: str) -> bool:
    """Return whether an HF tensor is of a layer's attention, by its name."""
    return any(part in hf for part in (".self_attn.", ".linear_attn."))


@dataclass(frozen=True)
class Piece:
    """A part of one HF tensor, and its place in a shard.

    Along ``dim``, the range ``start`` to ``stop`` of the HF tensor consists of ``groups`` groups of equal
    length, and the piece holds one run of each: all of it, or its range ``within``. The shard consists of as
    many groups along the same dimension, and each run begins at ``offset`` in its group. With ``joined`` the
    runs follow one another in the shard instead, from ``offset`` on.
    """

    hf: int
    """Index of the HF tensor among the parameter's."""
    start: int
    stop: int
    dim: int = 0
    groups: int = 1
    offset: int = 0
    within: tuple[int, int] | None = None
    joined: bool = False
    transposed: bool = False
    """The HF matrix has the rows of the shard as columns. Everything else is about the matrix transposed."""

    @property
    def length(self) -> int:
        """Elements of the piece along ``dim``."""
        return self.groups * self._run

    @property
    def is_contiguous(self) -> bool:
        """True if the part of the HF tensor is one contiguous block of it."""
        return self.dim == 0 and self.within is None and not self.transposed

    @property
    def hf_dim(self) -> int:
        """Dimension of the HF tensor along which the piece is a part of it."""
        return 1 - self.dim if self.transposed else self.dim

    @property
    def _run(self) -> int:
        if self.within is not None:
            return self.within[1] - self.within[0]
        return (self.stop - self.start) // self.groups

    def in_hf(self, tensor: Tensor) -> Tensor:
        """Return a view of the HF tensor: [groups, run, ...] along ``dim``."""
        tensor = tensor.transpose(0, 1) if self.transposed else tensor
        groups = _grouped(tensor.narrow(self.dim, self.start, self.stop - self.start), self.dim, self.groups)
        return groups if self.within is None else groups.narrow(self.dim + 1, self.within[0], self._run)

    def in_shard(self, tensor: Tensor) -> Tensor:
        """Return a view of the shard, with the shape and the order of ``in_hf``."""
        if self.joined or self.groups == 1:
            return _grouped(tensor.narrow(self.dim, self.offset, self.length), self.dim, self.groups)
        return _grouped(tensor, self.dim, self.groups).narrow(self.dim + 1, self.offset, self._run)


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
class RowRun:
    """Rows of an HF tensor that belong to a unit: ``rows`` rows from ``first + unit * stride`` on.

    With a stride of ``rows``, the runs of all units follow one another. A larger stride is the number of rows
    that the HF tensor has for each unit; ``first`` is then smaller than it.
    """

    hf: int
    """Index of the HF tensor among the parameter's."""
    first: int
    rows: int
    stride: int


@dataclass(frozen=True)
class Runs:
    """[rows, ...], split along the rows and composed of runs of HF rows; a rank holds whole units.

    In a shard, the runs of one unit follow one another (``by_unit``: Megatron's queries, gates, key and value
    of each key-value head), or the units of one run (Megatron's projection into linear attention, which has
    all queries first).
    """

    hf_shapes: tuple[Shape, ...]
    units: int
    runs: tuple[RowRun, ...]
    by_unit: bool
    label: str
    """Name of what ranks share, for error messages."""

    def shard_shape(self, size: int) -> Shape:
        rows = sum(run.rows for run in self.runs)
        return (self.units // size * rows, *self.hf_shapes[0][1:])

    def pieces(self, shard: Shard) -> tuple[Piece, ...]:
        first, stop = shard.range_of(self.units, self.label)
        count = stop - first
        offsets = accumulate((run.rows * (1 if self.by_unit else count) for run in self.runs), initial=0)
        return tuple(
            self._piece(run, first, stop, offset) for run, offset in zip(self.runs, offsets, strict=False)
        )

    def _piece(self, run: RowRun, first: int, stop: int, offset: int) -> Piece:
        groups, joined = stop - first, not self.by_unit
        if run.stride != run.rows:
            within = (run.first, run.first + run.rows)
            start, end = first * run.stride, stop * run.stride
            return Piece(run.hf, start, end, groups=groups, offset=offset, within=within, joined=joined)
        start, end = run.first + first * run.rows, run.first + stop * run.rows
        if joined:
            return Piece(run.hf, start, end, offset=offset)
        return Piece(run.hf, start, end, groups=groups, offset=offset)


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
class Transposed:
    """A matrix that HF has transposed: [inputs, outputs]."""

    matrix: Rows | Runs | Columns
    """The split of the matrix as Megatron has it: [outputs, inputs]."""

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return tuple(tuple(reversed(shape)) for shape in self.matrix.hf_shapes)

    def shard_shape(self, size: int) -> Shape:
        return self.matrix.shard_shape(size)

    def pieces(self, shard: Shard) -> tuple[Piece, ...]:
        return tuple(replace(piece, transposed=True) for piece in self.matrix.pieces(shard))


@dataclass(frozen=True)
class Mapping:
    """One Megatron parameter and the HF tensors that it holds.

    In names, ``{layer}`` stands for the number of the layer and ``{expert}`` for the number of the expert. A
    Megatron name counts the layers of the model chunk and the experts of the rank; an HF name counts all. HF
    names of experts without ``{expert}`` are those of tensors that stack all experts along a first dimension;
    ``split`` is then about one of them.
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
    frozen: bool = False
    """The parameter is not trained."""

    @property
    def stacked(self) -> bool:
        """True if each HF tensor holds the parameter of every expert."""
        return self.per_expert and not any("{expert}" in name for name in self.hf)

    def joined(self, hf: str) -> Mapping:
        """Return the mapping from one HF tensor, with the rows of those that are mapped one after another."""
        split = cast("Rows", self.split)
        units, columns = split.units or split.rows[0], split.columns
        firsts = accumulate(split.rows, initial=0)
        runs = tuple(
            RowRun(0, first, rows // units, stride=rows // units)
            for first, rows in zip(firsts, split.rows, strict=False)
        )
        shape = (sum(split.rows),) if columns is None else (sum(split.rows), columns)
        joined = Runs((shape,), units, runs, by_unit=split.units is not None, label=split.label)
        return replace(self, hf=(hf,), split=joined)

    def stacking_experts(self) -> Mapping:
        """Return the mapping of an expert's projections from HF tensors that stack those of all experts.

        Each of them then has its gate and its up projection, in this order, in one tensor.
        """
        prefix, _, _ = self.hf[0].partition(".{expert}.")
        match self.split:
            case Rows(rows=(gate, up), columns=int()) if gate == up:
                return self.joined(f"{prefix}.gate_up_proj")
            case Columns():
                return replace(self, hf=(f"{prefix}.down_proj",))
            case _:
                return self

    def name(self, spec: LayerSpec) -> str:
        return self.te if self.te and spec == "transformer_engine" else self.megatron


ExpertForm = Literal["single", "stacked", "transposed"]
"""Each expert has tensors of its own; or those of a layer are stacked; or they are stacked, and each is
[inputs, outputs]."""


@dataclass(frozen=True)
class Mappings:
    """All parameters of a model: before the decoder, in each layer, after the decoder."""

    embedding: tuple[Mapping, ...]
    layers: tuple[tuple[Mapping, ...], ...]
    head: tuple[Mapping, ...]
    passed_through: tuple[str, ...] = ()
    """Prefixes of the names of HF tensors that are not of the language model. They are not trained: every
    checkpoint that is written has them as they were read."""
    experts: ExpertForm = "single"
    """Form in which published checkpoints have the experts of a layer."""

    def renamed(self, new_name: Callable[[str], str]) -> Mappings:
        """Return the same mappings with ``new_name`` of each HF name."""

        def renamed(mappings: tuple[Mapping, ...]) -> tuple[Mapping, ...]:
            return tuple(replace(each, hf=tuple(map(new_name, each.hf))) for each in mappings)

        layers = tuple(map(renamed, self.layers))
        return replace(self, embedding=renamed(self.embedding), layers=layers, head=renamed(self.head))

    def with_experts_of(self, stored: AbstractMapping[str, Shape]) -> Mappings:
        """Return the mappings with experts in the form in which each layer has them in a checkpoint.

        ``stored``: shapes of its tensors. A layer without any experts in it has them as published.
        """

        def in_form(mapping: Mapping, form: ExpertForm) -> Mapping:
            if form == "single" or not mapping.per_expert or mapping.stacked:
                return mapping
            stacked = mapping.stacking_experts()
            if form == "stacked" or isinstance(stacked.split, Whole | Vocabulary | Transposed):
                return stacked
            return replace(stacked, split=Transposed(cast("Runs | Columns", stacked.split)))

        layers: list[tuple[Mapping, ...]] = []
        for number, layer in enumerate(self.layers):
            form = self._form_of(layer, number, stored)
            layers.append(tuple(in_form(mapping, form) for mapping in layer))
        return replace(self, layers=tuple(layers))

    def _form_of(
        self, layer: tuple[Mapping, ...], number: int, stored: AbstractMapping[str, Shape]
    ) -> ExpertForm:
        form = self.experts
        for mapping in layer:
            if not mapping.per_expert or mapping.stacked:
                continue
            if any(name.format(layer=number, expert=0) in stored for name in mapping.hf):
                return "single"
            stacking = mapping.stacking_experts()
            shape = stored.get(stacking.hf[0].format(layer=number, expert=0))
            if shape is None:
                continue
            if isinstance(stacking.split, Columns):
                # The shape of the down projection tells the forms apart, unless it is square.
                (outputs, inputs) = stacking.split.hf_shapes[0]
                if outputs != inputs and shape[1:] in ((outputs, inputs), (inputs, outputs)):
                    return "stacked" if shape[1:] == (outputs, inputs) else "transposed"
            form = "stacked" if self.experts == "single" else self.experts
        return form


def copy_in(target: Tensor, sources: Sequence[Tensor], pieces: Sequence[Piece]) -> None:
    """Fill a shard from its HF tensors. Elements that no piece covers are padding and become zero."""
    views = [(piece.in_shard(target), piece.in_hf(sources[piece.hf])) for piece in pieces]
    if sum(view.numel() for view, _ in views) < target.numel():
        target.zero_()
    for view, source in views:
        view.copy_(source)
