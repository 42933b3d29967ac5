"""Reducers and slices for tokens that are spread over context-parallel ranks.

A sequence of T tokens is padded to 2 * C chunks of equal size, C ranks. Rank r holds the chunks r and
2C - 1 - r. A log-prob of token t comes from the logits of token t - 1, so that the logits of a response of R
tokens are at [T - R - 1, T - 1).
"""

import torch
import torch.nn.functional as F
from megatron.core import mpu


def _chunks(length: int):
    """Return the size of a chunk, and [start, end) of both chunks of this rank."""
    rank, parts = mpu.get_context_parallel_rank(), 2 * mpu.get_context_parallel_world_size()
    size = -(-length // parts)
    return size, tuple((part * size, (part + 1) * size) for part in (rank, parts - 1 - rank))


def get_logits_and_tokens_offset_with_cp(total_length: int, response_length: int):
    """Return the size of a chunk, and for both chunks of this rank: [start, end), that of the logits of
    response tokens, and that of these tokens. An empty range is (0, 0). Offsets count from the start.
    """
    size, chunks = _chunks(total_length)
    logits, tokens = [], []
    for start, end in chunks:
        first, last = max(start, total_length - response_length - 1), min(end, total_length - 1)
        logits.append((first, last) if first < last else (0, 0))
        tokens.append((first + 1, last + 1) if first < last else (0, 0))
    return size, chunks, tuple(logits), tuple(tokens)


def get_sum_of_sample_mean(
    total_lengths, response_lengths, loss_masks, sample_denoms=None, calculate_per_token_loss=False
):
    """Return a function of values of response tokens: the sum over samples of their masked means.

    The function takes what this rank holds, [response tokens of all samples]. ``sample_denoms``: the divisor
    of each sample, where siblings share one mean; default: its tokens that carry loss. With
    ``calculate_per_token_loss`` the function is the masked sum.
    """
    if sample_denoms is None:
        sample_denoms = [mask.sum() for mask in loss_masks]
    masks = list(loss_masks)
    if mpu.get_context_parallel_world_size() > 1:
        masks = [
            _of_rank(mask, total, response)
            for total, response, mask in zip(total_lengths, response_lengths, loss_masks, strict=True)
        ]
    lengths = [len(mask) for mask in masks]

    def masked_sums(x: torch.Tensor):
        return [(part * mask).sum() for part, mask in zip(x.split(lengths), masks, strict=True)]

    def sum_of_token(x: torch.Tensor) -> torch.Tensor:
        return sum(masked_sums(x))

    def sum_of_sample_mean(x: torch.Tensor) -> torch.Tensor:
        pairs = zip(masked_sums(x), sample_denoms, strict=True)
        return sum(total / torch.clamp_min(denominator, 1) for total, denominator in pairs)

    return sum_of_token if calculate_per_token_loss else sum_of_sample_mean


def _of_rank(values, total_length: int, response_length: int):
    """Return those of [response tokens] that this rank holds."""
    *_, offsets = get_logits_and_tokens_offset_with_cp(total_length, response_length)
    prompt = total_length - response_length
    first, second = (values[max(start - prompt, 0) : max(end - prompt, 0)] for start, end in offsets)
    return first + second if isinstance(values, list) else torch.cat([first, second])


def slice_log_prob_with_cp(log_prob, total_length: int, response_length: int):
    """Return the log-probs of response tokens that this rank holds, as a list or a tensor."""
    if len(log_prob) != response_length:
        raise AssertionError(f"{len(log_prob)} log-probs of {response_length} response tokens")
    if mpu.get_context_parallel_world_size() == 1:
        return log_prob
    return _of_rank(log_prob, total_length, response_length)


def all_gather_with_cp(tensor: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    """Return the values of all response tokens, [response_length, ...], from those of every rank.

    Gradients flow back to the rank that holds a token.
    """
    if mpu.get_context_parallel_world_size() == 1:
        return tensor
    *_, offsets = get_logits_and_tokens_offset_with_cp(total_length, response_length)
    prompt = total_length - response_length
    whole = tensor.new_zeros(response_length, *tensor.shape[1:])
    places = [place for start, end in offsets for place in range(start - prompt, end - prompt) if end]
    index = torch.tensor(places, dtype=torch.long, device=tensor.device)
    import torch.distributed.nn as distributed

    return distributed.all_reduce(whole.index_add(0, index, tensor), group=mpu.get_context_parallel_group())


def slice_with_cp(tokens: torch.Tensor, pad_value) -> torch.Tensor:
    """Return both chunks of this rank, padded with a value or by a function of (tokens, pad)."""
    if mpu.get_context_parallel_world_size() == 1:
        return tokens
    size, chunks = _chunks(len(tokens))
    pad = 2 * mpu.get_context_parallel_world_size() * size - len(tokens)
    if callable(pad_value):
        tokens = pad_value(tokens, pad)
    else:
        tokens = F.pad(tokens, (0, 0) * (tokens.dim() - 1) + (0, pad), value=pad_value)
    return torch.cat([tokens[start:end] for start, end in chunks])
