"""What is to be done: how long each prompt and response is, what it is worth, and whether it fails.

Everything about the n-th sample of a prompt depends on the seed, the prompt's position and n alone, so that
all schedules are compared on the same work.
"""

import asyncio
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from slipstream.backend.simulate.trajectory import (
    Sample,
    SimulatedCompletion,
    SimulatedPrompt,
    SimulatedTrajectory,
)
from slipstream.configs.schema.simulate import LengthModel, SimulateConfig
from slipstream.rollout.trajectory import Messages, Prompt, Trajectory
from slipstream.rollout.workflow import WorkflowContext

BLOCK = 1024
"""Positions that are drawn at one time."""

KEPT = 4096
"""Blocks that are kept. Groups in flight are near each other, so that older ones are not asked for again."""

PROMPT, RESPONSE, STRAGGLER, DIFFICULTY, REWARD, JUDGING, FAILURE = range(7)
"""Independent streams of random numbers."""


class Workload:
    """Lengths and outcomes by (position, sample)."""

    def __init__(
        self, model: SimulateConfig, longest: int, seed: int, lengths: np.ndarray | None = None
    ) -> None:
        """``longest``: the cap of responses that has no other.

        ``lengths`` of responses take the place of the model's: [L] are drawn from, [groups, samples] are gone
        through in their order, so that answers to one prompt are as much alike as they were.
        """
        self.failure_rate = model.failures.episode
        self._model = model
        self._longest = longest
        self._seed = seed
        self._lengths = lengths
        self._blocks = lru_cache(KEPT)(self._draw)

    def sample(self, position: int, number: int) -> Sample:
        """The ``number``-th answer to the prompt at ``position``."""
        return self._blocks(position // BLOCK, number)[position % BLOCK]

    def fails(self, position: int, number: int, attempt: int) -> bool:
        """Whether an attempt at a sample does; the first one is attempt 0."""
        return self._random(FAILURE, position, number, attempt).random() < self.failure_rate

    def engine_failures(self, engine: int) -> np.random.Generator:
        return self._random(FAILURE, 0, engine, 2**32)

    def longest_request(self) -> int:
        """Most tokens, prompt included, that a request can come to."""
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
    """The prompt set, without an end."""

    def __init__(self) -> None:
        self.position = 0

    def at(self, position: int) -> SimulatedPrompt:
        return SimulatedPrompt(position, "")


HELD_OUT = 2**40
"""Positions of the prompts of evaluations begin here, beyond all that are trained."""


def held_out_prompts(number: int) -> list[Prompt]:
    return [SimulatedPrompt(HELD_OUT + index, "") for index in range(number)]


class SimulatedTokenizer:
    """Stands where a context needs a tokenizer: simulated episodes have no tokens."""

    def apply_chat_template(self, conversation: Messages, **kwargs: object) -> list[int]:
        """Raise: nothing is encoded."""
        raise AssertionError("a simulated episode encodes nothing")

    def decode(self, token_ids: Sequence[int], **kwargs: object) -> str:
        """Raise: nothing is decoded."""
        raise AssertionError("a simulated episode decodes nothing")


class EpisodeLost(RuntimeError):
    """The model says that this attempt fails."""


class SimulatedWorkflow:
    """One request and one judgement, like ``slipstream.rollout.workflow.SingleTurn``."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    async def run(self, prompt: Prompt, context: WorkflowContext) -> SimulatedTrajectory:
        assert isinstance(prompt, SimulatedPrompt)
        number = prompt.number(context.generator)
        completion = await context.generator.generate((prompt.id, number), context.sampling)
        assert isinstance(completion, SimulatedCompletion)
        sample, spans = completion.sample, completion.version_spans
        trajectory = SimulatedTrajectory(
            sample, spans, sum(tokens for _, tokens in spans), completion.retractions
        )
        if self._workload.failure_rate:
            attempt = prompt.attempt(number)
            if self._workload.fails(prompt.id, number, attempt):
                raise EpisodeLost(f"attempt {attempt + 1} at sample {number}")
        return trajectory.judged(await context.reward.score(prompt, "", trajectory))


class SimulatedReward:
    """Takes its time, and then says what the workload says."""

    def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> asyncio.Future[float]:
        assert isinstance(trajectory, SimulatedTrajectory)
        _, _, seconds, reward = trajectory.sample
        loop = asyncio.get_running_loop()
        judged: asyncio.Future[float] = loop.create_future()
        if seconds:
            loop.call_later(seconds, _judge, judged, float(reward))
        else:
            judged.set_result(float(reward))
        return judged


def _judge(judged: asyncio.Future[float], reward: float) -> None:
    if not judged.done():  # its episode may have been cancelled
        judged.set_result(reward)
