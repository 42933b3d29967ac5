"""Evaluation: greedy completions of held-out prompts, beside training."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slipstream.backend.driver.hooked_batches import HookedBatches
from slipstream.backend.driver.ports import RunListener
from slipstream.backend.monitor.units import mean
from slipstream.configs.schema.run import EvalConfig
from slipstream.rollout.collect.questions import EvaluationTasks
from slipstream.rollout.evaluated_set import HELD_OUT, EvaluatedSet
from slipstream.rollout.trajectory import Prompt, means_by_name, prompt_fields


class Evaluation:
    """Evaluates whatever version the engines serve."""

    def __init__(
        self,
        settings: EvalConfig,
        prompts: Sequence[Prompt],
        questions: EvaluationTasks,
        listener: RunListener,
        hooks: HookedBatches | None = None,
        *,
        by_function: bool = False,
    ) -> None:
        """``hooks`` see each evaluation; None: the recipe names none. ``by_function``: a function of the
        recipe evaluates, and the prompts are its own.
        """
        self._by_function = by_function
        self._every = settings.every
        self._prompts = prompts
        self._questions = questions
        self._listener = listener
        self._hooks = hooks

    def is_due(self, step: int, steps: int) -> bool:
        """True if an evaluation is due after training step ``step``, which is not the last one."""
        return self._every > 0 and step % self._every == 0 and step < steps

    async def run(self, version: int) -> float | None:
        """Evaluate, tell the listener, and return the mean reward.

        An evaluation that fails is noted, the run goes on, and None is returned.
        """
        try:
            result = await (self._ask_function(version) if self._by_function else self._ask_episodes())
        except _NotEvaluated as reason:
            self._listener.note(f"no evaluation of version {version}: {reason}")
            return None
        reward = mean([reward for each in result.sets for reward in each.rewards])
        length = mean([length for each in result.sets for length in each.lengths])
        is_logged = False
        if self._hooks is not None:
            metrics = {"eval/reward": reward, "eval/response_length": length}
            is_logged = await self._hooks.has_logged_evaluation(version, result.sets, metrics)
        self._listener.evaluated(version, reward, length, result.parts, result.metrics, is_logged=is_logged)
        return reward

    async def _ask_episodes(self) -> "_Result":
        """Run an episode for each held-out prompt. Raises _NotEvaluated."""
        results = await self._questions.ask(self._prompts)
        rewards = [result.reward for result in results if result.reward is not None]
        if len(rewards) < len(results):
            raise _NotEvaluated(next(result.note for result in results if result.reward is None))
        held_out = EvaluatedSet(
            HELD_OUT,
            rewards,
            [result.response_length for result in results],
            [result.is_truncated for result in results],
            [prompt_fields(prompt) for prompt in self._prompts],
        )
        return _Result(
            [held_out],
            means_by_name(result.reward_parts for result in results),
            means_by_name(result.metrics for result in results),
        )

    async def _ask_function(self, version: int) -> "_Result":
        """Have the recipe's function evaluate. Raises _NotEvaluated."""
        result = await self._questions.ask_function(version)
        if not result.sets:
            raise _NotEvaluated(result.note)
        several = result.sets if len(result.sets) > 1 else []
        return _Result(result.sets, {each.name: mean(each.rewards) for each in several}, {})


class _NotEvaluated(Exception):
    """Nothing is known of a version, and why."""


class _Result(NamedTuple):
    sets: list[EvaluatedSet]
    parts: Mapping[str, float]
    """Means besides that of the rewards, by the names of their metrics."""
    metrics: Mapping[str, float]
    """Means of what workflows have recorded, by name."""
