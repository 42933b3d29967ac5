"""A simulated episode: one request, and the judging of its completion."""

import asyncio
from collections.abc import Sequence

from slipstream.backend.simulate.simulated_engine import Request
from slipstream.backend.simulate.simulated_pool import SimulatedPool
from slipstream.backend.simulate.trajectory import SimulatedCompletion, SimulatedTrajectory, Spans
from slipstream.backend.simulate.workload import Workload
from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.reward.value import Judgement
from slipstream.rollout.tokens.trajectory import Messages, Prompt, Trajectory
from slipstream.rollout.workflow import WorkflowContext


class SimulatedTokenizer:
    """Stands where a context needs a tokenizer: simulated episodes have no tokens."""

    eos_token_id = -1

    def apply_chat_template(self, conversation: Messages, **kwargs: object) -> list[int]:
        """Raise: nothing is encoded."""
        raise AssertionError("a simulated episode encodes nothing")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raise: nothing is encoded."""
        raise AssertionError("a simulated episode encodes nothing")

    def decode(self, token_ids: Sequence[int], **kwargs: object) -> str:
        """Raise: nothing is decoded."""
        raise AssertionError("a simulated episode decodes nothing")


class EpisodeLost(RuntimeError):
    """An attempt at an episode failed, as the workload says."""


class NumberedGenerator:
    """The engines as one sample of a group sees them."""

    def __init__(self, pool: SimulatedPool, sample: int, attempt: int = 0, *, greedy: bool = False) -> None:
        """``attempt``: number of the attempt at the episode, from 0."""
        self._pool = pool
        self._greedy = greedy
        self.sample = sample
        self.attempt = attempt
        self.prior: Spans = ()
        """Version spans of what the completion has from before."""
        self.request: Request | None = None
        """The request under way."""

    async def generate(self, input_ids: Sequence[int], sampling: SamplingConfig) -> SimulatedCompletion:
        return await self._pool.generate(
            input_ids, sampling, greedy=self._greedy, prior=self.prior, started=self._started
        )

    def _started(self, request: Request) -> None:
        self.request = request


class NoReward:
    """Stands where a context needs a reward: simulated workflows leave the judging to ``judge``."""

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        """Raise: no workflow asks."""
        raise AssertionError("a simulated workflow asks for no reward")


class SimulatedWorkflow:
    """Makes one request, like ``slipstream.rollout.workflow.SingleTurn``."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    async def run(self, prompt: Prompt, context: WorkflowContext) -> SimulatedTrajectory:
        generator = context.generator
        assert isinstance(generator, NumberedGenerator)
        number = generator.sample
        completion = await generator.generate((prompt.id, number), context.sampling)
        assert isinstance(completion, SimulatedCompletion)
        if self._workload.failure_rate and self._workload.fails(prompt.id, number, generator.attempt):
            raise EpisodeLost(f"attempt {generator.attempt + 1} at sample {number}")
        return SimulatedTrajectory(completion.sample, completion.version_spans, completion.retractions)


class SimulatedJudge:
    """Judges every trajectory by itself: ``rollout.reward.value.EpisodeJudge``."""

    of_groups = False

    async def judge(self, prompt: Prompt, trajectory: Trajectory) -> Judgement:
        """Return the workload's reward after the workload's time of judging."""
        assert isinstance(trajectory, SimulatedTrajectory)
        _, _, seconds, reward = trajectory.sample
        if seconds:
            await asyncio.sleep(seconds)
        return Judgement(float(reward))

    async def judge_group(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """Raise: no simulated reward judges groups."""
        raise AssertionError("a simulated reward judges no group")
