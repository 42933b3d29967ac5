"""HF tensors that travel together in one flat tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class FlatBucket:
    """The HF tensors of one bucket, back to back in ``flat``.

    The export makes the bucket after the next in the same memory.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: Tensor
    last: bool
    """True if this bucket completes the version."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each HF name with a view into ``flat``."""
        parts = torch.split(self.flat, [prod(shape) for shape in self.shapes])
        for name, shape, part in zip(self.names, self.shapes, parts, strict=True):
            yield name, part.view(shape)
