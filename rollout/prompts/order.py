"""A seeded endless order over a prompt set."""

import random
from functools import lru_cache

from slipstream.rollout.trajectory import Prompt


class PromptStream:
    """An endless order over a prompt set in which any position can be looked up.

    Each epoch holds every prompt once. Epoch e is shuffled by (seed, e), so that the order depends on
    nothing else and a resumed run goes on in it.
    """

    def __init__(self, prompts: list[Prompt], *, shuffle: bool, seed: int, position: int = 0) -> None:
        self._prompts = prompts
        self._shuffle = shuffle
        self._seed = seed
        self.position = position
        """Position of the next prompt that has not been drawn."""
        self._order = lru_cache(maxsize=2)(self._order_of)

    def draw(self) -> int:
        """Return the position of the next prompt, and go on behind it."""
        self.position += 1
        return self.position - 1

    @property
    def is_ready(self) -> bool:
        """True if the next prompt is there, as it always is."""
        return True

    def at(self, position: int) -> Prompt:
        """Return the prompt at any position, drawn already or not."""
        epoch, offset = divmod(position, len(self._prompts))
        return self._order(epoch)[offset]

    def _order_of(self, epoch: int) -> list[Prompt]:
        order = list(self._prompts)
        if self._shuffle:
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order
