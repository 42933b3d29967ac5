"""How the trainer's ranks share the model. Pure: no process groups.

Ranks are in Megatron's order: within a pipeline stage tensor-parallel ranks are next to each other, then come
those that share a context, which have the same weights, and then the data-parallel replicas. Experts have a
grid of their own over the same ranks of a stage: first the ranks that share an expert, then those that have
different ones, then the replicas.
"""

from dataclasses import dataclass
from typing import Literal

from slipstream.configs.schema import ParallelConfig

LayerSpec = Literal["local", "transformer_engine"]


class UnevenSplit(ValueError):
    """The sizes of the model do not divide by the parallel layout."""


@dataclass(frozen=True)
class Place:
    """Where a layer is: on which pipeline stage, in which of its chunks, and as which layer of the chunk."""

    stage: int
    chunk: int
    layer: int


@dataclass(frozen=True)
class Layout:
    """The layout that an export plan or a load is made for."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    """Replicas of the weights: those of data parallelism, times the ranks that share a context."""
    chunks: int = 1
    """Model chunks of a stage (virtual pipeline stages)."""
    expert: int = 1
    expert_tensor: int | None = None
    """None: as ``tensor``."""
    layers: tuple[int, ...] | None = None
    """Layers of each part of the model, in the order of the forward pass; None: the same number in each."""
    layer_spec: LayerSpec = "local"

    @classmethod
    def of(cls, parallel: ParallelConfig, layer_spec: LayerSpec = "local") -> "Layout":
        """That of a recipe's ``actor.parallel``."""
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
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    def check(self) -> None:
        """Raises UnevenSplit when the experts' grid does not fit on the ranks of a stage."""
        ranks = self.tensor * self.data
        if ranks % (self.expert * self.etp):
            raise UnevenSplit(
                f"{self.expert} expert-parallel times {self.etp} expert-tensor-parallel ranks do not divide "
                f"the {ranks} ranks of a pipeline stage"
            )

    def part_sizes(self, n_layers: int) -> tuple[int, ...]:
        """Layers of each part of the model: chunk 0 of every stage, chunk 1 of every stage, and so on."""
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
                "actor.parallel.pipeline and virtual_pipeline so that they can, or say in "
                "actor.parallel.layers how many layers each part has"
            )
        return (n_layers // parts,) * parts

    def places(self, n_layers: int) -> list[Place]:
        """Of every layer."""
        return [
            Place(part % self.pipeline, part // self.pipeline, layer)
            for part, size in enumerate(self.part_sizes(n_layers))
            for layer in range(size)
        ]

    def owners(self, stage: int, *, expert: int | None = None) -> list[int]:
        """The ranks of the first replica that hold the shards of a parameter, in order.

        ``expert``: the expert-parallel rank that has it; None: it is no expert's.
        """
        first = stage * self.tensor * self.data
        if expert is None:
            return list(range(first, first + self.tensor))
        return list(range(first + expert * self.etp, first + (expert + 1) * self.etp))


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands in a layout."""

    stage: int
    tensor: int
    expert: int
    expert_tensor: int

    @classmethod
    def of(cls, rank: int, layout: Layout) -> "Coordinates":
        stage, inside = divmod(rank, layout.tensor * layout.data)
        return cls(
            stage,
            inside % layout.tensor,
            inside // layout.etp % layout.expert,
            inside % layout.etp,
        )


@dataclass(frozen=True)
class Shard:
    """Part ``rank`` of ``size`` along a tensor-parallel dimension."""

    rank: int
    size: int

    def range_of(self, n: int, what: str) -> tuple[int, int]:
        """Start and end of this part of ``n`` things called ``what``. Raises UnevenSplit."""
        if n % self.size:
            raise UnevenSplit(
                f"{n} {what} cannot be split evenly over {self.size} tensor-parallel ranks; "
                "choose actor.parallel.tensor (expert_tensor for experts) as a divisor"
            )
        rows = n // self.size
        return self.rank * rows, (self.rank + 1) * rows
