"""Log-probs and entropies of response tokens from logits, for losses that start from these.

The vocabulary may be split over tensor-parallel ranks, and tokens over context-parallel ones.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    **_: Any,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return an empty tensor, and `log_probs` and, if asked for, `entropy`: one tensor for each sample, over
    the response tokens whose logits this rank has. Both have gradients.

    logits: float32 [1, T, V], of the whole micro-batch, before the temperature.
    """
    index_r, target_r, counts = _chosen(unconcat_tokens, total_lengths, response_lengths)
    logits_rV = logits[0].index_select(0, index_r.to(logits.device)) / args.rollout_temperature
    logp_r, entropy_r = _log_probs(logits_rV, target_r.to(logits.device))
    values = {"log_probs": list(logp_r.split(counts))}
    if with_entropy:
        values["entropy"] = list(entropy_r.split(counts))
    return logits.new_empty(0), values


def _log_probs(logits_rV: Tensor, target_r: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs of the targets, and entropies, [r] each, over the ranks that share the vocabulary."""
    columns = logits_rV.shape[-1]
    group = parallel_state.get_tensor_model_parallel_group()
    highest_r = logits_rV.detach().max(dim=-1).values
    torch.distributed.all_reduce(highest_r, torch.distributed.ReduceOp.MAX, group)
    shifted_rV = logits_rV - highest_r[:, None]
    local_r = target_r - parallel_state.get_tensor_model_parallel_rank() * columns
    is_here_r = (local_r >= 0) & (local_r < columns)
    chosen_r = shifted_rV.gather(1, local_r.clamp(0, columns - 1)[:, None])[:, 0]
    exp_rV = shifted_rV.exp()
    parts = (exp_rV.sum(-1), torch.where(is_here_r, chosen_r, 0.0), (exp_rV * shifted_rV).sum(-1))
    total_r, target_logit_r, weighted_r = reduce_from_tensor_model_parallel_region(torch.stack(parts))
    log_total_r = total_r.log()
    return target_logit_r - log_total_r, log_total_r - weighted_r / total_r


def _chosen(
    tokens: Sequence[Tensor], total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> tuple[Tensor, Tensor, list[int]]:
    """Return the positions of the logits of response tokens, the tokens, and their number in each sample."""
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    indices: list[Tensor] = []
    targets: list[Tensor] = []
    start = 0
    for sample, total, response in zip(tokens, total_lengths, response_lengths, strict=True):
        place_R = local_R = torch.arange(total - response - 1, total - 1)
        chunk = total if size == 1 else -(-total // (2 * size))
        if size > 1:  # this rank has the chunks ``rank`` and ``last``, in this order
            last = 2 * size - 1 - rank
            chunk_R = place_R // chunk
            place_R = place_R[(chunk_R == rank) | (chunk_R == last)]
            before_R = torch.where(place_R // chunk == last, (last - 1) * chunk, rank * chunk)
            local_R = place_R - before_R
        indices.append(start + local_R)
        targets.append(sample.cpu()[place_R + 1])
        start += total if size == 1 else 2 * chunk
    none = torch.empty(0, dtype=torch.long)
    return torch.cat([none, *indices]), torch.cat([none, *targets]), list(map(len, indices))
