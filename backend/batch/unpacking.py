"""Ways from a pack to padded batches of its segments, and back. Pure: numpy in, numpy out.

Shapes: T tokens of the pack; a class has N segments, padded to L tokens each.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Unpacking:
    """Places of a pack's tokens in padded batches, one for each class of lengths."""

    shapes: tuple[tuple[int, int], ...]
    """(N, L) of each class."""
    gather: np.ndarray
    """int64: place in the pack of every padded place, one class after the other; padding repeats the last
    token of its segment."""
    restore_T: np.ndarray
    """int64: padded place of every token of the pack."""


def length_classes(cu_seqlens: list[int]) -> list[list[tuple[int, int]]]:
    """Return the segments of a pack as (start, end), grouped by powers of two of their length.

    Padding the segments of one class to the longest of them at most doubles their tokens.

    >>> length_classes([0, 3, 7, 20])
    [[(0, 3), (3, 7)], [(7, 20)]]
    """
    classes: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(cu_seqlens):
        if end > start:
            classes.setdefault(math.ceil(math.log2(end - start)), []).append((start, end))
    return list(classes.values())


def unpacking_of(cu_seqlens: np.ndarray) -> Unpacking:
    """Return the unpacking of a pack with these boundaries."""
    shapes: list[tuple[int, int]] = []
    gathers: list[np.ndarray] = []
    restore_T = np.empty(int(cu_seqlens[-1]), np.int64)
    padded = 0
    for segments in length_classes(cu_seqlens.tolist()):
        start_N, end_N = np.array(segments, np.int64).T
        longest = int((end_N - start_N).max())
        place_NL = start_N[:, None] + np.arange(longest)
        inside_NL = place_NL < end_N[:, None]
        restore_T[place_NL[inside_NL]] = padded + np.flatnonzero(inside_NL)
        gathers.append(np.minimum(place_NL, end_N[:, None] - 1).ravel())
        shapes.append(place_NL.shape)
        padded += place_NL.size
    gather = np.concatenate(gathers) if gathers else np.empty(0, np.int64)
    return Unpacking(tuple(shapes), gather, restore_T)
