"""Attributes of parameters by which Megatron reduces gradients, and the gradient that DDP adds."""

from typing import Protocol, cast

from torch import Tensor
from torch.nn import Parameter


class Marks(Protocol):
    sequence_parallel: bool
    """The gradient is summed over tensor-parallel ranks, each of which has seen its own tokens only."""
    allreduce: bool
    """False for a parameter of an expert: its replicas are on expert-data-parallel ranks only."""
    main_grad: Tensor
    """Gradient in DDP's buffer, of parameters that are trained."""


def marks_of(parameter: Parameter) -> Marks:
    """Return ``parameter`` as Megatron sees it; assignments set the attributes."""
    return cast("Marks", parameter)
