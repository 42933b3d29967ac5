"""The work of a simulation: the length of each prompt and response, its reward, and whether it fails.

Everything about the n-th sample of a prompt depends only on the seed, the prompt's position and n. So all
schedules get the same work.
"""

import math
from functools import lru_cache

import numpy as np

from slipstream.backend.simulate.trajectory import (
    Sample,
)
from slipstream.configs.schema.simulate import LengthModel, SimulateConfig
from slipstream.rollout.tokens.trajectory import Prompt

BLOCK = 1024
"""Number of positions that are drawn together."""

KEPT = 64
"""Number of cached blocks. Groups in flight are close together, so that older blocks are not needed again."""

PROMPT, RESPONSE, STRAGGLER, DIFFICULTY, REWARD, JUDGING, FAILURE = range(7)
"""Independent streams of random numbers."""


FAILING = ("engine", "engine_node", "trainer", "trainer_node", "first_node")
"""Kinds of parts that fail."""


class Workload:
    """Lengths and rewards by position and sample."""

    def __init__(
        self, model: SimulateConfig, longest: int, seed: int, lengths: np.ndarray | None = None
    ) -> None:
        """Use ``longest`` as the cap of responses if the model has none.

        Response ``lengths`` replace the model's lengths. Lengths [L] are drawn at random; lengths
        [groups, samples] are used group by group, which keeps the completions of one prompt as similar as
        they were.
        """
        self.failure_rate = model.failures.episode
        self._model = model
        self._longest = longest
        self._seed = seed
        self._lengths = lengths
        self._blocks = lru_cache(KEPT)(self._draw)

    def sample(self, position: int, number: int) -> Sample:
        """Return the ``number``-th sample of the prompt at ``position``."""
        return self._blocks(position // BLOCK, number)[position % BLOCK]

    def fails(self, position: int, number: int, attempt: int) -> bool:
        """True if an attempt at a sample fails. The first attempt is number 0."""
        return self._random(FAILURE, position, number, attempt).random() < self.failure_rate

    def failures(self, kind: str, number: int) -> np.random.Generator:
        """Return the random numbers that decide when part ``number`` of a kind (``FAILING``) fails."""
        return self._random(FAILURE, 0, number, 2**32 + FAILING.index(kind))

    def longest_request(self) -> int:
        """Return the largest number of tokens of a request, prompt included."""
        model = self._model
        longest = int(self._lengths.max()) if self._lengths is not None else self._cap(model.responses)
        if model.responses.straggler_fraction:
            longest = round(longest * model.responses.straggler_factor)
        return self._cap(model.prompts) + longest

    def _cap(self, model: LengthModel) -> int:
        return self._longest if model.cap is None else model.cap

    def _random(self, stream: int, block: int, number: int, attempt: int = 0) -> np.random.Generator:
        return np.random.Generator(
            np.random.Philox(key=[self._seed, stream], counter=[0, attempt, number, block])
        )

    def _draw_lengths(self, model: LengthModel, random: np.random.Generator) -> np.ndarray:
        drawn = np.exp(math.log(model.median) + model.sigma * random.standard_normal(BLOCK))
        return np.clip(np.rint(drawn), 1, self._cap(model)).astype(np.int64)

    def _draw(self, block: int, number: int) -> list[Sample]:
        model = self._model
        prompts = self._draw_lengths(model.prompts, self._random(PROMPT, block, 0))
        responses = self._draw_responses(block, number)
        deviations = self._random(JUDGING, block, number).standard_normal(BLOCK)
        judging_s = model.reward.median_s * np.exp(model.reward.sigma * deviations)
        difficulty = self._random(DIFFICULTY, block, 0).random(BLOCK)
        rewards = self._random(REWARD, block, number).random(BLOCK) < difficulty
        return list(zip(*(a.tolist() for a in (prompts, responses, judging_s, rewards)), strict=True))

    def _draw_responses(self, block: int, number: int) -> np.ndarray:
        model, random = self._model.responses, self._random(RESPONSE, block, number)
        if self._lengths is None:
            drawn = self._draw_lengths(model, random)
        elif self._lengths.ndim == 1:
            drawn = self._lengths[random.integers(len(self._lengths), size=BLOCK)]
        else:
            groups, samples = self._lengths.shape
            drawn = self._lengths[(block * BLOCK + np.arange(BLOCK)) % groups, number % samples]
        if model.straggler_fraction:
            straggles = self._random(STRAGGLER, block, number).random(BLOCK) < model.straggler_fraction
            drawn = np.where(straggles, np.rint(drawn * model.straggler_factor).astype(np.int64), drawn)
        return drawn


class SimulatedStream:
    """An endless prompt set."""

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.is_ready = True

    def draw(self) -> int:
        self.position += 1
        return self.position - 1

    def at(self, position: int) -> Prompt:
        return Prompt(position, "")


HELD_OUT = 2**40
"""First position of held-out prompts, beyond the positions that training reaches."""
