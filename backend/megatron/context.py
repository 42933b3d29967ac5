"""Log-probs of a micro-batch whose tokens are shared by context-parallel ranks: each rank gets those of all.

A loss can then be about whole trajectories, and every rank of the group computes the same. Gradients flow
back to the rank's own tokens only; what ranks have to say about the weights is summed with that of replicas.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own_m: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        rank = group.rank()
        padded = own_m.new_zeros(max(1, *counts))  # idle micro-batches have none
        padded[: len(own_m)] = own_m
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded, group)
        ctx.own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    @staticmethod
    def backward(ctx, grad_M: Tensor) -> tuple[Tensor, None, None]:
        return grad_M[ctx.own], None, None


def gathered(own_m: Tensor, counts: Sequence[int], order_M: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The values [M] of all ranks, of which this one has ``own_m``: see ``ContextShare``."""
    return _Gather.apply(own_m, counts, group)[order_M]
