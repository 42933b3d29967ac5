"""Evaluation: greedy completions of held-out prompts, beside training."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from slipstream.backend.driver.ports import RunListener
from slipstream.backend.monitor.units import mean
from slipstream.configs.schema import SamplingConfig
from slipstream.configs.schema.run import EvalConfig
from slipstream.rollout.collect.episodes import EpisodeFailed, Episodes
from slipstream.rollout.trajectory import Completion, Prompt
from slipstream.rollout.workflow import WorkflowContext


class GreedyEngines(Protocol):
    """Engines that can be asked at temperature 0."""

    async def generate(
        self, input_ids: Sequence[int], sampling: SamplingConfig, *, greedy: bool = False
    ) -> Completion: ...


@dataclass(frozen=True)
class GreedyGenerator:
    """The engines as a workflow sees them during evaluation."""

    engines: GreedyEngines

    async def generate(self, input_ids: Sequence[int], sampling: SamplingConfig) -> Completion:
        return await self.engines.generate(input_ids, sampling, greedy=True)


class Evaluation:
    """Evaluates whatever version the engines serve."""

    def __init__(
        self,
        settings: EvalConfig,
        prompts: Sequence[Prompt],
        engines: GreedyEngines,
        context: WorkflowContext,
        episodes: Episodes,
        listener: RunListener,
    ) -> None:
        """``context``: the one of training. Its generator and its token limit are replaced."""
        sampling = context.sampling
        if settings.max_new_tokens is not None:
            sampling = sampling.model_copy(update={"max_new_tokens": settings.max_new_tokens})
        self._every = settings.every
        self._prompts = prompts
        self._context = replace(context, generator=GreedyGenerator(engines), sampling=sampling)
        self._episodes = episodes
        self._listener = listener

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether to evaluate after training step ``step``, which is not the last one."""
        return self._every > 0 and step % self._every == 0 and step < steps

    async def run(self, version: int) -> None:
        """Evaluate, and tell the listener. An evaluation that fails is noted, and the run goes on."""
        try:
            async with asyncio.TaskGroup() as running:
                tasks = [
                    running.create_task(self._episodes.run(prompt, self._context)) for prompt in self._prompts
                ]
        except* EpisodeFailed as failures:
            self._listener.note(f"no evaluation of version {version}: {failures.exceptions[0]}")
        else:
            trajectories = [task.result() for task in tasks]
            rewards = [trajectory.reward or 0.0 for trajectory in trajectories]  # each episode has one
            lengths = [trajectory.response_length for trajectory in trajectories]
            self._listener.evaluated(version, mean(rewards), mean(lengths))
