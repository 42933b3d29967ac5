"""Log-prob and entropy of chosen tokens from vocabulary-parallel logits, in float32."""

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabParallelLogProb(torch.autograd.Function):
    """log softmax(logits)[target] over logits that are split by vocabulary.

    Forward: one MAX and one SUM all-reduce. Backward: none, d logp / d logits = onehot(target) - softmax.
    The entropy is a by-product without a gradient.
    """

    @staticmethod
    def forward(ctx, logits_TV: Tensor, target_T: Tensor, first: int, group: dist.ProcessGroup | None):
        peak_T = logits_TV.max(dim=-1).values
        if group is not None:
            dist.all_reduce(peak_T, dist.ReduceOp.MAX, group)
        shifted_TV = logits_TV - peak_T[:, None]
        exp_TV = shifted_TV.exp()
        local_T = target_T - first
        mine_T = (local_T >= 0) & (local_T < logits_TV.shape[-1])
        row_T = torch.arange(len(target_T), device=target_T.device)
        column_T = local_T.clamp(0, logits_TV.shape[-1] - 1)
        # A column of -inf (padding) has probability 0 and must not make 0 * -inf of the entropy.
        weighted_T = (exp_TV * shifted_TV.nan_to_num(neginf=0.0)).sum(-1)
        chosen_T = torch.where(mine_T, shifted_TV[row_T, column_T], 0.0)
        sums_3T = torch.stack([exp_TV.sum(-1), chosen_T, weighted_T])
        if group is not None:
            dist.all_reduce(sums_3T, dist.ReduceOp.SUM, group)
        total_T, chosen_T, weighted_T = sums_3T
        log_total_T = total_T.log()
        ctx.save_for_backward(exp_TV.div_(total_T[:, None]), row_T, column_T, mine_T)
        entropy_T = log_total_T - weighted_T / total_T
        ctx.mark_non_differentiable(entropy_T)
        return chosen_T - log_total_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T: Tensor, _entropy_grad: Tensor):
        softmax_TV, row_T, column_T, mine_T = ctx.saved_tensors
        grad_TV = softmax_TV * -grad_T[:, None]
        grad_TV[row_T, column_T] += grad_T * mine_T
        return grad_TV, None, None, None


def vocab_parallel_logprob(
    logits_TV: Tensor,
    target_T: Tensor,
    *,
    temperature: float,
    vocab: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs (differentiable) and entropies (not) of ``target_T`` at ``temperature``, float32 [T].

    logits_TV: this rank's columns, any float type. ``vocab``: the true vocabulary size; columns past it are
    padding and have probability 0. ``group``: the tensor-parallel group, None when the logits are whole.
    """
    columns = logits_TV.shape[-1]
    first = columns * (dist.get_rank(group) if group is not None else 0)
    logits_TV = logits_TV.float() / temperature
    if first + columns > vocab:
        padding_V = torch.arange(first, first + columns, device=logits_TV.device) >= vocab
        logits_TV = logits_TV.masked_fill(padding_V, float("-inf"))
    return _VocabParallelLogProb.apply(logits_TV, target_T, first, group)
