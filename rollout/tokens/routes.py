"""The experts that an engine sent tokens to, for the trainer to send them there as well.

In array names, T is the number of tokens, R of rows, and W the number of choices of a token: layers of the
model * experts of a token in each. Layers without experts have columns too, which nobody reads.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Experts = npt.NDArray[np.uint8 | np.uint16]

NO_ROUTE = int(np.iinfo(np.uint16).max)
"""Stands for an expert that is not known: the trainer's own router chooses one."""

BYTE = 256
"""Number of experts up to which each is stored as one byte."""


class Routes(NamedTuple):
    """The experts of some tokens of one request and its completion, which follow each other."""

    request: int
    """Number of token ids of the request."""
    start: int
    """Place of the first of the tokens, from the beginning of the request."""
    ids_RW: Experts

    @property
    def end(self) -> int:
        """Place after the last of the tokens."""
        return self.start + len(self.ids_RW)


def narrowed(ids: npt.NDArray[np.integer]) -> Experts:
    """Return ids of experts in one byte each, or in two where one is not enough.

    Raises ValueError for what cannot be an expert.
    """
    lowest, highest = int(np.min(ids, initial=0)), int(np.max(ids, initial=0))
    if lowest < 0 or highest >= NO_ROUTE:
        raise ValueError(f"experts {lowest} to {highest} of tokens, expected 0 to {NO_ROUTE - 1}")
    return ids.astype(np.uint8 if highest < BYTE else np.uint16)


def placed_routes(tokens: int, parts: Sequence[tuple[int, Experts]]) -> npt.NDArray[np.uint16]:
    """Return the experts [T, W] of ``tokens`` tokens, made of (first token, experts) of some of them.

    Later ones replace earlier ones of the same tokens. Raises ValueError for other tokens, and for parts that
    are not of the same model.
    """
    widths = {ids_RW.shape[1] for _, ids_RW in parts}
    if len(widths) != 1:
        raise ValueError(f"tokens with {sorted(widths)} choices of experts, expected one number for all")
    whole = np.full((tokens, *widths), NO_ROUTE, np.uint16)
    for start, ids_RW in parts:
        if not 0 <= start <= start + len(ids_RW) <= tokens:
            raise ValueError(f"experts of the tokens {start} to {start + len(ids_RW)} of {tokens} tokens")
        whole[start : start + len(ids_RW)] = ids_RW
    return whole


def known_runs(ids_TW: npt.NDArray[np.uint16], start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of neighbouring tokens from token ``start`` on whose experts are known."""
    is_known_T = np.zeros(len(ids_TW) + 2, np.bool_)
    is_known_T[start + 1 : -1] = is_known(ids_TW[start:])
    (changes,) = np.nonzero(is_known_T[1:] != is_known_T[:-1])
    yield from zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True)


def is_known(ids_TW: npt.NDArray[np.uint16]) -> npt.NDArray[np.bool_]:
    """Return of which tokens the experts are known, bool [T]."""
    return (ids_TW != NO_ROUTE).all(axis=1)


def joined_routes(
    parts: Iterable[tuple[int, npt.NDArray[np.uint16] | None]],
) -> npt.NDArray[np.uint16] | None:
    """Return the experts of the tokens of several trajectories, one after the other.

    ``parts``: number of tokens and experts of each; None: they are not known. None if no part has any.
    """
    known, end = list[tuple[int, Experts]](), 0
    for length, ids_TW in parts:
        if ids_TW is not None:
            known.append((end, ids_TW))
        end += length
    return placed_routes(end, known) if known else None
