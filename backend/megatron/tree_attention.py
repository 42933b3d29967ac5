"""What the tokens of a pack attend to, as one function of two places, and attention by it on GPUs.

Trajectories that share prefixes stand in a pack as their prefix tree does, depth first. A token is a node,
its depth is its position, and its subtree is the tokens from its place up to the next that is not deeper:

    place       0 1 2 3 4 5 6 7        prompt 0 1 2, completions 3 4 and 5 6, of which 6 is followed by 7
    depth       0 1 2 3 4 3 4 4
    end         8 8 8 5 5 8 7 8

A token attends to the keys in whose subtree it is, in a layer with a window only to those whose depth is
within it. Packs without shared prefixes are trees too: each trajectory is one.

The dense masks of packed attention are made from this function (``PackedAttention``). On GPUs FlexAttention
(arXiv:2412.05496) compiles it into a kernel, which passes over blocks of queries and keys without a pair that
is seen, and needs no mask in the others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128
"""Queries, and keys, of a block. FlexAttention's kernels expect a multiple of their own tiles, up to 128."""

STEPS = 4
"""Lengths of compiled kernels between two powers of two. Packs are padded to the next one, by a quarter at
most: dynamic lengths are specialized by the checks of a block mask (github.com/pytorch/pytorch/pull/189952),
so that every new length would compile a kernel. Of padding a block of queries computes one block of pairs."""

KERNELS = 256
"""Compiled variants of attention in a process: of lengths, heads, windows, and passes with gradients and
without. One more is an error, because torch would go on with an implementation that holds all scores."""

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From batch, head, place of a query and place of a key to whether the query attends to it; FlexAttention's
signature. Batch and head are not looked at."""


def subtree_ends(cu_seqlens: np.ndarray, taken_N: np.ndarray) -> np.ndarray:
    """Return the end of each token's subtree, int32 [T]: the place after its last one.

    cu_seqlens: boundaries of the trajectories' own tokens. taken_N: tokens that each takes from before it.

    >>> subtree_ends(np.array([0, 5, 7, 8]), np.array([0, 3, 4])).tolist()
    [8, 8, 8, 5, 5, 8, 7, 8]
    """
    end_T = np.empty(int(cu_seqlens[-1]), np.int32)
    # Of the segments after the present one, those that no nearer one with fewer taken tokens hides, the
    # nearest last. A token is followed by the nearest that does not take it.
    followed = [(-1, len(end_T))]
    for start, stop, taken in reversed(list(zip(cu_seqlens[:-1], cu_seqlens[1:], taken_N, strict=True))):
        if start == stop:
            continue
        branches: list[tuple[int, int]] = []
        while followed[-1][0] >= taken:
            branches.append(followed.pop())
        takes, places = np.array([followed[-1], *reversed(branches)]).T
        depth_t = np.arange(taken, taken + stop - start)
        end_T[start:stop] = places[np.searchsorted(takes, depth_t, side="right") - 1]
        followed.append((int(taken), int(start)))
    return end_T


@dataclass
class PrefixTree:
    """The prefix tree of the tokens of a pack, on the device."""

    end_T: Tensor
    position_T: Tensor
    block_masks: dict[int | None, BlockMask] = field(default_factory=dict[int | None, BlockMask])
    """By the window of layers: made at the first use, for all of them."""

    def block_mask(self, window: int | None) -> BlockMask:
        """Return the block mask of layers with this window, for a pack padded to ``padded_length``."""
        if window not in self.block_masks:
            self.block_masks[window] = block_mask(self.end_T, self.position_T, window)
        return self.block_masks[window]


def sees(end_T: Tensor, position_T: Tensor, window: int | None) -> Sees:
    """Return the function that says what the tokens of a pack attend to. window: None: all before them."""

    def before(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_T[key])

    if window is None:
        return before
    first_T = position_T - (window - 1)

    def within(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return before(batch, head, query, key) & (position_T[key] >= first_T[query])

    return within


def padded_length(tokens: int, block: int = BLOCK) -> int:
    """Return the length to which a pack is padded: blocks, in as many steps as ``STEPS`` says.

    >>> [padded_length(tokens) // BLOCK for tokens in (1, 1000, 1200, 5000, 33000)]
    [1, 8, 10, 40, 320]
    """
    blocks = -(-tokens // block)
    step = max(1, (1 << (blocks - 1).bit_length()) // (2 * STEPS))
    return -(-blocks // step) * step * block


def block_mask(end_T: Tensor, position_T: Tensor, window: int | None, block: int = BLOCK) -> BlockMask:
    """Return the mask of a pack by blocks. Padding is trees of one token each.

    A block of queries after its own sees a key if the key's subtree reaches into the block, and all of its
    queries do if the subtree reaches to its end. So the largest end of a block of keys says whether any pair
    is seen, and the smallest one whether all are, without a look at pairs. Positions bound the distances of
    pairs likewise: a block may be visited in which the window hides every pair.
    """
    length = padded_length(len(end_T), block)
    place = torch.arange(length, device=end_T.device, dtype=torch.int32)
    end = torch.cat([end_T.int(), place[len(end_T) :] + 1])
    position = F.pad(position_T.int(), (0, length - len(end_T)))
    first_R, last_R = place[::block], place[block - 1 :: block]
    end_RB, position_RB = end.view(-1, block), position.view(-1, block)
    is_before_RC = first_R[:, None] > first_R
    seen_RC = is_before_RC & (end_RB.amax(1) > first_R[:, None])
    whole_RC = is_before_RC & (end_RB.amin(1) > last_R[:, None])
    if window is not None:
        nearest_RC = position_RB.amin(1)[:, None] - position_RB.amax(1)
        farthest_RC = position_RB.amax(1)[:, None] - position_RB.amin(1)
        seen_RC &= nearest_RC < window
        whole_RC &= farthest_RC < window
    seen_RC |= first_R[:, None] == first_R
    return BlockMask.from_kv_blocks(
        *_listed(seen_RC & ~whole_RC),
        *_listed(whole_RC),
        BLOCK_SIZE=block,
        mask_mod=sees(end, position, window),
        seq_lengths=(length, length),
    )


def _listed(chosen_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of each row are chosen, int32 [1, 1, R], and these first, int32 [1, 1, R, C]."""
    counts = chosen_RC.sum(1, dtype=torch.int32)
    places = chosen_RC.int().argsort(dim=1, descending=True, stable=True).int()
    return counts[None, None], places[None, None]


@cache
def _compiled(backend: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    return torch.compile(  # pyright: ignore[reportCallIssue]  # no overload has the limit
        flex_attention, backend=backend, dynamic=False, fullgraph=True, recompile_limit=KERNELS
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, *, scale: float, sinks: Tensor | None
) -> Tensor:
    """query [T, heads, d], key [T, groups, d], value [T, groups, v] -> [T, heads * v].

    sinks [heads]: a logit of each head that takes part in the softmax and has no value. It divides the result
    by 1 + exp(sink) / sum of exp(scores).
    """
    tokens, heads = query.shape[:2]
    padding = (0, 0, 0, 0, 0, mask.shape[-1] - tokens)
    q, k, v = (F.pad(part, padding).transpose(0, 1)[None] for part in (query, key, value))
    output, more = _compiled()(
        q,
        k,
        v,
        block_mask=mask,
        scale=scale,
        enable_gqa=heads != key.shape[1],
        return_aux=AuxRequest(lse=sinks is not None),
    )
    if sinks is not None:
        share = torch.sigmoid(more.lse - sinks.to(more.lse.dtype)[:, None])
        output = (output * share[..., None]).type_as(output)
    return output[0].transpose(0, 1)[:tokens].flatten(1)
