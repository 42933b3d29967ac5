"""Seeded endless orders over prompts, in which any position can be looked up.

position ──► turn_at: which source, and how many of its prompts came before ──► epoch and place ──► prompt

Nothing but the seed, the names, the sizes and the weights of the sources decides the order, so that a resumed
run goes on in it.
"""

import random
from array import array
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm

from slipstream.rollout.prompts.stored import PromptSet
from slipstream.rollout.tokens.trajectory import Prompt


class EpochOrder:
    """An endless order over the places 0 to ``size`` - 1.

    Each epoch holds every place once. Epoch e is shuffled by (seed, name, e).
    """

    def __init__(self, size: int, *, shuffle: bool, seed: int, name: str = "") -> None:
        self._size = size
        self._seed = f"{seed}:{name}" if name else str(seed)
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._order_of)

    def at(self, position: int) -> int:
        """Return the place at a position."""
        epoch, offset = divmod(position, self._size)
        return self._order(epoch)[offset] if self._shuffle else offset

    def _order_of(self, epoch: int) -> "array[int]":
        order = array("I", range(self._size))
        random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order


class PromptStream:
    """An endless order over the prompts of a set.

    Several sources take turns, so that among the first n prompts each has its share of n up to a few prompts,
    for every n.
    """

    def __init__(self, prompts: PromptSet, *, shuffle: bool, seed: int, position: int = 0) -> None:
        self._sources = [source.prompts for source in prompts.sources]
        self._orders = [
            EpochOrder(len(source.prompts), shuffle=shuffle, seed=seed, name=source.name)
            for source in prompts.sources
        ]
        self._shares = whole_shares(
            [len(source.prompts) if source.weight is None else source.weight for source in prompts.sources]
        )
        self.position = position
        """Position of the next prompt that has not been drawn."""

    def draw(self) -> int:
        """Return the position of the next prompt, and move on to the one after it."""
        self.position += 1
        return self.position - 1

    @property
    def is_ready(self) -> bool:
        """True if the next prompt is there, as it always is."""
        return True

    def at(self, position: int) -> Prompt:
        """Return the prompt at any position, drawn already or not."""
        source, turn = turn_at(self._shares, position)
        return self._sources[source][self._orders[source].at(turn)]


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the proportions of ``weights``."""
    fractions = [Fraction(str(weight)) for weight in weights]
    factor = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * factor) for fraction in fractions]


def turn_at(shares: Sequence[int], position: int) -> tuple[int, int]:
    """Return which source has its turn at a position, and how many turns it has had before.

    The order is that in which Sainte-Laguë's method gives away seats: turn k of a source with the share s
    comes at the time (k + 1/2) / s.
    """
    if len(shares) == 1:
        return 0, position
    total, time = sum(shares), max(0, position - len(shares))
    # Turns up to a time at which no more than ``position`` have been had, then one after the other.
    turns = [(2 * share * time + total) // (2 * total) for share in shares]
    while True:
        source = min(range(len(shares)), key=lambda each: Fraction(2 * turns[each] + 1, shares[each]))
        if sum(turns) == position:
            return source, turns[source]
        turns[source] += 1
