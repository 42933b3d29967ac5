"""Entropy of the next-token distribution from vocabulary-parallel logits, in float32, with a gradient."""

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabParallelEntropy(torch.autograd.Function):
    """H = -sum p log p over logits that are split by vocabulary.

    Forward: one MAX and two SUM all-reduces. Backward: none, d H / d logits = -p (log p + H).
    """

    @staticmethod
    def forward(ctx, logits_TV: Tensor, group: dist.ProcessGroup | None):
        peak_T = logits_TV.max(dim=-1).values
        if group is not None:
            dist.all_reduce(peak_T, dist.ReduceOp.MAX, group)
        logp_TV = logits_TV - peak_T[:, None]
        total_T = logp_TV.exp().sum(-1)
        if group is not None:
            dist.all_reduce(total_T, dist.ReduceOp.SUM, group)
        logp_TV = logp_TV - total_T.log()[:, None]
        # A column of -inf (padding) has probability 0 and must not make 0 * -inf of the entropy.
        logp_TV = logp_TV.nan_to_num(neginf=torch.finfo(logp_TV.dtype).min)
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        if group is not None:
            dist.all_reduce(entropy_T, dist.ReduceOp.SUM, group)
        ctx.save_for_backward(logp_TV, entropy_T)
        return entropy_T

    @staticmethod
    def backward(ctx, grad_T: Tensor):
        logp_TV, entropy_T = ctx.saved_tensors
        return -logp_TV.exp() * (logp_TV + entropy_T[:, None]) * grad_T[:, None], None


def vocab_parallel_entropy(
    logits_TV: Tensor, *, temperature: float, vocab: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Differentiable entropies at ``temperature``, float32 [T]; arguments: ``vocab_parallel_logprob``."""
    columns = logits_TV.shape[-1]
    first = columns * (dist.get_rank(group) if group is not None else 0)
    logits_TV = logits_TV.float() / temperature
    if first + columns > vocab:
        padding_V = torch.arange(first, first + columns, device=logits_TV.device) >= vocab
        logits_TV = logits_TV.masked_fill(padding_V, float("-inf"))
    return _VocabParallelEntropy.apply(logits_TV, group)
