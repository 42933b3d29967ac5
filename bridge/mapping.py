"""How one Megatron parameter relates to HF tensors: the vocabulary that family mappings are written in.

Each kind knows three things, all pure: which rows or columns of the HF tensors make up a tensor-parallel
shard (``read``), how shards join to HF tensors again (``merge``), and the shapes of both, so that a plan
can be made without a tensor. ``merge(shards of read) == HF tensors``, bit for bit: only slicing and
concatenation happen here, never arithmetic. Plans and checks need this module without torch, so it is
imported by the one function that joins tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bridge.geometry import Geometry
from bridge.layout import LayerSpec, Shard

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


class Slices(Protocol):
    """Part of one HF tensor: indexing reads only what is asked for (a safetensors slice, or a Tensor)."""

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Tensor: ...


class Mapping(Protocol):
    """One Megatron parameter. ``{layer}`` in a name stands for the layer's index."""

    megatron: str
    hf: tuple[str, ...]

    def name(self, spec: LayerSpec) -> str: ...
    def shard_shape(self, geometry: Geometry, size: int) -> Shape: ...
    def hf_shapes(self, geometry: Geometry) -> tuple[Shape, ...]: ...
    def read(self, sources: Sequence[Slices], geometry: Geometry, shard: Shard) -> Tensor: ...
    def merge(self, shards: Sequence[Tensor], geometry: Geometry) -> tuple[Tensor, ...]: ...


def _join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch

    return torch.cat(tuple(parts), dim=dim)


@dataclass(frozen=True)
class _Named:
    megatron: str
    hf: tuple[str, ...]
    transformer_engine: str | None = None
    """Megatron's name under the Transformer Engine layer spec, where it differs (fused layer norms)."""

    def name(self, spec: LayerSpec) -> str:
        return self.transformer_engine or self.megatron if spec == "transformer_engine" else self.megatron


@dataclass(frozen=True)
class Replicated(_Named):
    """A vector that every tensor-parallel rank holds whole (norm weights)."""

    size: Callable[[Geometry], int] = lambda g: g.hidden

    def shard_shape(self, geometry: Geometry, size: int) -> Shape:
        return (self.size(geometry),)

    def hf_shapes(self, geometry: Geometry) -> tuple[Shape, ...]:
        return ((self.size(geometry),),)

    def read(self, sources: Sequence[Slices], geometry: Geometry, shard: Shard) -> Tensor:
        return sources[0][:]

    def merge(self, shards: Sequence[Tensor], geometry: Geometry) -> tuple[Tensor, ...]:
        return (shards[0],)


@dataclass(frozen=True)
class VocabRows(_Named):
    """[vocab, hidden], split by rows; Megatron pads the vocabulary with zero rows to an even split."""

    def shard_shape(self, geometry: Geometry, size: int) -> Shape:
        return (geometry.padded_vocab(size) // size, geometry.hidden)

    def hf_shapes(self, geometry: Geometry) -> tuple[Shape, ...]:
        return ((geometry.vocab, geometry.hidden),)

    def read(self, sources: Sequence[Slices], geometry: Geometry, shard: Shard) -> Tensor:
        start, end = shard.range_of(geometry.padded_vocab(shard.size), "vocabulary rows")
        rows = sources[0][min(start, geometry.vocab) : min(end, geometry.vocab)]
        padding = rows.new_zeros(end - start - rows.shape[0], geometry.hidden)
        return _join([rows, padding])

    def merge(self, shards: Sequence[Tensor], geometry: Geometry) -> tuple[Tensor, ...]:
        return (_join(shards)[: geometry.vocab],)


@dataclass(frozen=True)
class InputColumns(_Named):
    """[hidden, inputs], split over the inputs: Megatron's row-parallel linear layer."""

    inputs: Callable[[Geometry], int] = lambda g: g.ffn_hidden

    def shard_shape(self, geometry: Geometry, size: int) -> Shape:
        return (geometry.hidden, self.inputs(geometry) // size)

    def hf_shapes(self, geometry: Geometry) -> tuple[Shape, ...]:
        return ((geometry.hidden, self.inputs(geometry)),)

    def read(self, sources: Sequence[Slices], geometry: Geometry, shard: Shard) -> Tensor:
        start, end = shard.range_of(self.inputs(geometry), "input columns")
        return sources[0][:, start:end]

    def merge(self, shards: Sequence[Tensor], geometry: Geometry) -> tuple[Tensor, ...]:
        return (_join(shards, dim=1),)


@dataclass(frozen=True)
class GateUp(_Named):
    """Gate over up projection; every rank holds its rows of the gate, then its rows of the up projection."""

    def shard_shape(self, geometry: Geometry, size: int) -> Shape:
        return (2 * geometry.ffn_hidden // size, geometry.hidden)

    def hf_shapes(self, geometry: Geometry) -> tuple[Shape, ...]:
        return ((geometry.ffn_hidden, geometry.hidden),) * 2

    def read(self, sources: Sequence[Slices], geometry: Geometry, shard: Shard) -> Tensor:
        start, end = shard.range_of(geometry.ffn_hidden, "MLP rows")
        return _join([source[start:end] for source in sources])

    def merge(self, shards: Sequence[Tensor], geometry: Geometry) -> tuple[Tensor, ...]:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return _join(gates), _join(ups)


@dataclass(frozen=True)
class GroupedQKV(_Named):
    """Fused query, key, value, interleaved by key-value group: [q q .. k v] per group, split over groups.

    A ``bias`` has the same rows and no columns.
    """

    bias: bool = False

    def _tail(self, geometry: Geometry) -> Shape:
        return () if self.bias else (geometry.hidden,)

    def shard_shape(self, geometry: Geometry, size: int) -> Shape:
        rows = (geometry.n_heads + 2 * geometry.n_kv_heads) * geometry.head_dim
        return (rows // size, *self._tail(geometry))

    def hf_shapes(self, geometry: Geometry) -> tuple[Shape, ...]:
        heads = (geometry.n_heads, geometry.n_kv_heads, geometry.n_kv_heads)
        return tuple((n * geometry.head_dim, *self._tail(geometry)) for n in heads)

    def _rows_per_group(self, geometry: Geometry) -> tuple[int, int, int]:
        queries = geometry.n_heads // geometry.n_kv_heads
        return queries * geometry.head_dim, geometry.head_dim, geometry.head_dim

    def read(self, sources: Sequence[Slices], geometry: Geometry, shard: Shard) -> Tensor:
        first, last = shard.range_of(geometry.n_kv_heads, "key-value heads")
        parts = []
        for source, rows in zip(sources, self._rows_per_group(geometry), strict=True):
            part = source[first * rows : last * rows]
            parts.append(part.reshape(last - first, rows, *self._tail(geometry)))
        return _join(parts, dim=1).flatten(0, 1)

    def merge(self, shards: Sequence[Tensor], geometry: Geometry) -> tuple[Tensor, ...]:
        rows = self._rows_per_group(geometry)
        groups = _join(shards).reshape(geometry.n_kv_heads, sum(rows), *self._tail(geometry))
        return tuple(part.flatten(0, 1) for part in groups.split(rows, dim=1))


@dataclass(frozen=True)
class Mappings:
    """All parameters of a model: before the decoder, per layer, after the decoder."""

    embedding: tuple[Mapping, ...]
    layer: tuple[Mapping, ...]
    head: tuple[Mapping, ...]
