"""The shares that context-parallel ranks have of a micro-batch's tokens. Pure: numpy in, numpy out.

Each trajectory is cut into 2 * size chunks of equal length; rank r holds chunk r and chunk 2 * size - 1 - r.
With causal attention an early chunk attends to few tokens and a late one to many, so that every such pair
costs the same. Transformer Engine expects packed sequences (THD) to be shared this way.

Shapes: T tokens of the micro-batch, M of them with loss; t and m for the part of one rank.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slipstream.backend.batch.micro_batch import MicroBatch


def places_of_rank(cu_seqlens: np.ndarray, size: int, rank: int) -> np.ndarray:
    """Return the places of a pack that rank ``rank`` of ``size`` holds, in that rank's order.

    Raises ValueError for a trajectory that cannot be cut into equal chunks.

    >>> places_of_rank(np.array([0, 4, 12]), 2, 0).tolist()
    [0, 3, 4, 5, 10, 11]
    >>> places_of_rank(np.array([0, 4, 12]), 2, 1).tolist()
    [1, 2, 6, 7, 8, 9]
    """
    boundaries: list[int] = cu_seqlens.tolist()
    held: list[np.ndarray] = []
    for start, end in pairwise(boundaries):
        if (end - start) % (2 * size):
            raise ValueError(f"{end - start} tokens cannot be cut into {2 * size} chunks of equal length")
        chunks = np.arange(start, end).reshape(2 * size, -1)
        held += [chunks[rank], chunks[2 * size - 1 - rank]]
    return np.concatenate(held) if held else np.empty(0, np.int64)


@dataclass(frozen=True)
class ContextShare:
    """The part of a micro-batch that one rank holds."""

    tokens_t: np.ndarray
    position_t: np.ndarray
    index_m: np.ndarray
    """Places among ``tokens_t`` that predict a token with loss."""
    target_m: np.ndarray
    order_M: np.ndarray
    """Place of each token with loss in the concatenation of all ranks' ``target_m``, in order of rank."""
    counts: tuple[int, ...]
    """Number of tokens with loss that each rank predicts."""
    routes_tW: np.ndarray | None
    """uint16: as ``MicroBatch.routes_TW``."""


def share_of(micro: MicroBatch, size: int, rank: int) -> ContextShare:
    """Return the share of rank ``rank`` of ``size``; a group of one rank holds the whole micro-batch."""
    if size == 1:
        everything = np.arange(len(micro.index_M))
        return ContextShare(
            micro.tokens_T,
            micro.position_T,
            micro.index_M,
            micro.target_M,
            everything,
            (len(everything),),
            micro.routes_TW,
        )
    holder_T, local_T = np.empty_like(micro.tokens_T), np.empty_like(micro.tokens_T)
    for other in range(size):
        place_t = places_of_rank(micro.cu_seqlens, size, other)
        holder_T[place_t], local_T[place_t] = other, np.arange(len(place_t))
    holder_M = holder_T[micro.index_M]
    is_here_M = holder_M == rank
    place_t = places_of_rank(micro.cu_seqlens, size, rank)
    return ContextShare(
        tokens_t=micro.tokens_T[place_t],
        position_t=micro.position_T[place_t],
        index_m=local_T[micro.index_M[is_here_M]],
        target_m=micro.target_M[is_here_M],
        order_M=np.argsort(np.argsort(holder_M, kind="stable")),
        counts=tuple(np.bincount(holder_M, minlength=size).tolist()),
        routes_tW=None if micro.routes_TW is None else micro.routes_TW[place_t],
    )
