"""How the ranks of a context-parallel group share the tokens of a micro-batch. Pure: numpy in, numpy out.

Each trajectory is cut into 2 * size chunks of equal length, of which rank r has chunk r and chunk
2 * size - 1 - r: with causal attention an early chunk has little to attend to and a late one much, so that
every pair costs the same. That is how Transformer Engine expects packed sequences (THD) to be shared.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slipstream.backend.batch.micro_batch import MicroBatch


def own_places(cu_seqlens: np.ndarray, size: int, rank: int) -> np.ndarray:
    """The places of a pack that rank ``rank`` of ``size`` has, in its order.

    Raises ValueError for a trajectory that cannot be cut into equal chunks.

    >>> own_places(np.array([0, 4, 12]), 2, 0).tolist()
    [0, 3, 4, 5, 10, 11]
    >>> own_places(np.array([0, 4, 12]), 2, 1).tolist()
    [1, 2, 6, 7, 8, 9]
    """
    found = []
    for start, end in pairwise(cu_seqlens.tolist()):
        if (end - start) % (2 * size):
            raise ValueError(f"{end - start} tokens cannot be cut into {2 * size} chunks of equal length")
        chunks = np.arange(start, end).reshape(2 * size, -1)
        found += [chunks[rank], chunks[2 * size - 1 - rank]]
    return np.concatenate(found) if found else np.empty(0, np.int64)


@dataclass(frozen=True)
class ContextShare:
    """What one rank has of a micro-batch with T tokens, M of which are predicted for the loss."""

    tokens_t: np.ndarray
    position_t: np.ndarray
    index_m: np.ndarray
    """Of the M places that predict a token with loss, those that are here, as places among ``tokens_t``."""
    target_m: np.ndarray
    order_M: np.ndarray
    """Of each of the M: where it is among those of all ranks, one rank's after the other's."""
    counts: tuple[int, ...]
    """How many of the M each rank has."""


def share_of(micro: MicroBatch, size: int, rank: int) -> ContextShare:
    """That of rank ``rank`` of ``size``; of a single one, everything."""
    if size == 1:
        everything = np.arange(len(micro.index_M))
        return ContextShare(
            micro.tokens_T, micro.position_T, micro.index_M, micro.target_M, everything, (len(everything),)
        )
    owner_T, local_T = np.empty_like(micro.tokens_T), np.empty_like(micro.tokens_T)
    for one in range(size):
        place_t = own_places(micro.cu_seqlens, size, one)
        owner_T[place_t], local_T[place_t] = one, np.arange(len(place_t))
    owner_M = owner_T[micro.index_M]
    own = owner_M == rank
    place_t = own_places(micro.cu_seqlens, size, rank)
    return ContextShare(
        tokens_t=micro.tokens_T[place_t],
        position_t=micro.position_T[place_t],
        index_m=local_T[micro.index_M[own]],
        target_m=micro.target_M[own],
        order_M=np.argsort(np.argsort(owner_M, kind="stable")),
        counts=tuple(np.bincount(owner_M, minlength=size).tolist()),
    )
