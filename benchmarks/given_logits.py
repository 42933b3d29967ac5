"""Log-prob and entropy of chosen tokens from logits that exist already, by the trainer's softmax.

The trainer itself takes log-probs from hidden states (``backend.objective.logprob``); benchmarks and tests
compare with this.

Shapes: T tokens, V columns of the vocabulary on this rank; t for some of the tokens.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.objective import logprob
from slipstream.backend.objective.softmax import Scratch, Softmax


def vocab_parallel_logprob(
    logits_TV: Tensor,
    target_T: Tensor,
    *,
    temperature: float,
    vocab: int,
    group: dist.ProcessGroup | None = None,
    entropy_gradient: bool = False,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies as ``fused_logprob`` does, from this rank's columns, any float type.

    overwrite: the backward pass puts the gradient into the memory of the logits, which nobody else may need.
    """
    held = logprob.columns_of_rank(logits_TV.shape[-1], vocab, group)
    return _GivenLogits.apply(logits_TV, target_T, temperature, held, group, entropy_gradient, overwrite)


class _GivenLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        target_T: Tensor,
        temperature: float,
        held: range,
        group: dist.ProcessGroup | None,
        entropy_gradient: bool,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        logp_T, entropy_T = torch.empty(2, len(logits_TV), dtype=torch.float32, device=logits_TV.device)
        softmaxes = []
        for rows, scratch in _row_blocks(logits_TV):
            softmaxes.append(softmax := Softmax(target_T[rows], held, temperature))
            if len(held):
                softmax.add(logits_TV[rows, : len(held)], scratch, 0)
            logp_T[rows], entropy, _ = softmax.reduce(group)
            assert entropy is not None
            entropy_T[rows] = entropy
        ctx.save_for_backward(logits_TV)
        ctx.softmaxes, ctx.columns = softmaxes, len(held)
        ctx.entropy_gradient, ctx.overwrite = entropy_gradient, overwrite
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (logits_TV,) = ctx.saved_tensors
        grad_T, entropy_grad_T = grads
        grad_TV = logits_TV.detach() if ctx.overwrite else torch.empty_like(logits_TV)
        for softmax, (rows, scratch) in zip(ctx.softmaxes, _row_blocks(logits_TV), strict=True):
            if ctx.columns:
                logits_tv = logits_TV[rows, : ctx.columns]
                entropy_grad_t = entropy_grad_T[rows] if ctx.entropy_gradient else None
                grad_TV[rows, : ctx.columns] = softmax.gradient(
                    logits_tv, scratch, 0, grad_T[rows], entropy_grad_t
                )
        grad_TV[:, ctx.columns :] = 0
        return grad_TV, None, None, None, None, None, None


def _row_blocks(logits_TV: Tensor) -> Iterator[tuple[slice, Scratch]]:
    """Cut the tokens into blocks, the same on all ranks."""
    tokens, columns = logits_TV.shape
    rows = max(1, logprob.SLICE_ELEMENTS[logits_TV.device.type] // max(1, columns))
    scratch = Scratch(min(rows, tokens) * columns, logits_TV.device)
    for start in range(0, tokens, rows):
        yield slice(start, min(start + rows, tokens)), scratch
