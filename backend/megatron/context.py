"""Log-probs of a micro-batch whose tokens context-parallel ranks share: each rank gets those of all.

A loss can then be about whole trajectories, and every rank of the group computes the same. Gradients flow
back only to the rank's own tokens; the gradients of the weights are summed over the group as over replicas.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class _Context(Protocol):
    held: slice
    """This rank's part of the gathered values."""


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, local_m: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        rank = group.rank()
        padded = local_m.new_zeros(max(1, *counts))  # an idle micro-batch has no values
        padded[: len(local_m)] = local_m
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group)
        ctx.held = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_M,) = grads
        return grad_M[ctx.held], None, None


def gathered(local_m: Tensor, counts: Sequence[int], order_M: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the values [M] of all ranks in the micro-batch's order, from this rank's ``local_m``.

    ``counts`` and ``order_M`` are those of the rank's ``ContextShare``.
    """
    return _Gather.apply(local_m, counts, group)[order_M]
