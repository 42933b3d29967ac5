"""Where one rank stands in the parallel layout of the model. Pure: no process groups."""

from dataclasses import dataclass
from typing import Literal

LayerSpec = Literal["local", "transformer_engine"]


class UnevenSplit(ValueError):
    """The sizes of the model do not divide by the parallel layout."""


@dataclass(frozen=True)
class Layout:
    """The model-parallel layout that an export plan or a load is made for."""

    tensor: int = 1
    pipeline: int = 1
    layer_spec: LayerSpec = "local"

    def layers_of(self, stage: int, n_layers: int) -> range:
        """Global indices of the decoder layers on pipeline stage ``stage``. Raises UnevenSplit."""
        if n_layers % self.pipeline:
            raise UnevenSplit(
                f"{n_layers} layers cannot be split evenly over {self.pipeline} pipeline stages; "
                "choose actor.parallel.pipeline as a divisor of the number of layers"
            )
        per_stage = n_layers // self.pipeline
        return range(stage * per_stage, (stage + 1) * per_stage)


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
                "choose actor.parallel.tensor as a divisor"
            )
        rows = n // self.size
        return self.rank * rows, (self.rank + 1) * rows
