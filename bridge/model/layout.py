"""The part of a model that each of the trainer's ranks holds. Imports no torch and needs no process groups.

Ranks are in Megatron's order. Within a pipeline stage, tensor-parallel ranks are adjacent; then come the
ranks that share a context, which hold the same weights, and then the data-parallel replicas. Experts have a
grid of their own over the ranks of a stage: first the ranks that share an expert, then the ranks with
different experts, then the replicas.
"""

from dataclasses import dataclass
from typing import Literal

from slipstream.configs.schema import ParallelConfig

LayerSpec = Literal["local", "transformer_engine"]


class UnevenSplit(ValueError):
    """A size of the model is not divisible as the parallel layout requires."""


@dataclass(frozen=True)
class Place:
    """The place of a decoder layer: its pipeline stage, its model chunk there, its number in the chunk."""

    stage: int
    chunk: int
    layer: int


@dataclass(frozen=True)
class Layout:
    """The parallel layout of an export plan or a load."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    """Replicas of the weights: data-parallel ranks times the ranks that share a context."""
    chunks: int = 1
    """Model chunks per stage (virtual pipeline stages)."""
    expert: int = 1
    expert_tensor: int | None = None
    """None: equal to ``tensor``."""
    layers: tuple[int, ...] | None = None
    """Layers of each part of the model, in the order of the forward pass; None: the same number in each."""
    layer_spec: LayerSpec = "local"

    @classmethod
    def of(cls, parallel: ParallelConfig, layer_spec: LayerSpec = "local") -> "Layout":
        """Return the layout of a recipe's ``actor.parallel``."""
        return cls(
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            data=parallel.data * parallel.context,
            chunks=parallel.virtual_pipeline,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor,
            layers=tuple(parallel.layers) if parallel.layers else None,
            layer_spec=layer_spec,
        )

    @property
    def world_size(self) -> int:
        return self.tensor * self.data * self.pipeline

    @property
    def etp(self) -> int:
        """Number of ranks that share an expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    def check(self) -> None:
        """Raise UnevenSplit if the experts' grid does not fit on the ranks of a stage."""
        ranks = self.tensor * self.data
        if ranks % (self.expert * self.etp):
            raise UnevenSplit(
                f"{self.expert} expert-parallel times {self.etp} expert-tensor-parallel ranks do not divide "
                f"the {ranks} ranks of a pipeline stage"
            )

    def part_sizes(self, n_layers: int) -> tuple[int, ...]:
        """Return the layers of each part of the model: chunk 0 of every stage, chunk 1 of every stage, ..."""
        parts = self.pipeline * self.chunks
        if self.layers is not None:
            if len(self.layers) != parts or sum(self.layers) != n_layers:
                raise UnevenSplit(
                    f"actor.parallel.layers is {list(self.layers)}: expected {parts} numbers that sum to the "
                    f"model's {n_layers} layers"
                )
            return self.layers
        if n_layers % parts:
            raise UnevenSplit(
                f"{n_layers} layers cannot be split evenly over {parts} parts of the pipeline; choose "
                "actor.parallel.pipeline and virtual_pipeline so that they can, or give the layers of each "
                "part in actor.parallel.layers"
            )
        return (n_layers // parts,) * parts

    def places(self, n_layers: int) -> list[Place]:
        """Return the place of every layer."""
        return [
            Place(part % self.pipeline, part // self.pipeline, layer)
            for part, size in enumerate(self.part_sizes(n_layers))
            for layer in range(size)
        ]

    def owners(self, stage: int, *, expert: int | None = None) -> list[int]:
        """Return the ranks of the first replica that hold a parameter, in the order of their shards.

        ``expert``: expert-parallel rank that holds the parameter; None: it belongs to no expert.
        """
        first = stage * self.tensor * self.data
        if expert is None:
            return list(range(first, first + self.tensor))
        return list(range(first + expert * self.etp, first + (expert + 1) * self.etp))


@dataclass(frozen=True)
class Coordinates:
    """The place of one rank in a layout."""

    stage: int
    tensor: int
    expert: int
    expert_tensor: int

    @classmethod
    def of(cls, rank: int, layout: Layout) -> "Coordinates":
        stage, rank_in_stage = divmod(rank, layout.tensor * layout.data)
        return cls(
            stage,
            rank_in_stage % layout.tensor,
            rank_in_stage // layout.etp % layout.expert,
            rank_in_stage % layout.etp,
        )


@dataclass(frozen=True)
class Shard:
    """Shard ``rank`` of ``size`` along a tensor-parallel dimension."""

    rank: int
    size: int

    def range_of(self, n: int, label: str) -> tuple[int, int]:
        """Return start and end of this shard among ``n`` units. Raises UnevenSplit, which names ``label``."""
        if n % self.size:
            raise UnevenSplit(
                f"{n} {label} cannot be split evenly over {self.size} tensor-parallel ranks; "
                "choose actor.parallel.tensor (expert_tensor for experts) as a divisor"
            )
        length = n // self.size
        return self.rank * length, (self.rank + 1) * length
