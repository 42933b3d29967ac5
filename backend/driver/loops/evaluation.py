"""Evaluation: completions of held-out prompts, beside training.

waits for       ``EvaluationTasks.ask``: the answer to each question
unblocked by    ``EvaluationTasks.answered``, with what a collector has sent
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slipstream.backend.driver.loops.hooked_batches import HookedBatches
from slipstream.backend.driver.ports import RunListener
from slipstream.backend.monitor.course import read_course
from slipstream.backend.monitor.passes import passes
from slipstream.configs.schema import EvalConfig
from slipstream.rollout.collection.driver.questions import EvaluationTasks
from slipstream.rollout.tokens.evaluated_set import HELD_OUT, EvaluatedSet
from slipstream.rollout.tokens.named_numbers import mean, means_by_name
from slipstream.rollout.tokens.trajectory import Prompt


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
        step_of: Callable[[int], int],
        by_function: bool = False,
    ) -> None:
        """``step_of``: returns the number of training steps that led to a version. ``hooks`` see each
        evaluation; None: the recipe names none. ``by_function``: a function of the recipe evaluates, and the
        prompts are its own.
        """
        self._by_function = by_function
        self._step_of = step_of
        self._every = settings.every
        self._before_training = settings.before_training
        self._prompts = prompts
        self._samples = settings.n_samples_per_prompt
        self._questions = questions
        self._listener = listener
        self._hooks = hooks

    def is_due_first(self, step: int, run: Path) -> bool:
        """True if the initial policy is to be evaluated before training. Raises OSError.

        It is not evaluated again once the metrics in the run folder ``run`` have its evaluation, or ``step``
        training steps are done: an earlier start of the run may have ended before, during or after it.
        """
        return self._before_training and step == 0 and 0 not in read_course(run).evaluations

    def is_due(self, step: int, steps: int) -> bool:
        """True if an evaluation is due after training step ``step``, which is not the last one."""
        return self._every > 0 and step % self._every == 0 and step < steps

    async def run(self, version: int) -> float | None:
        """Evaluate, tell the listener, and return the mean reward.

        An evaluation that fails is noted, the run goes on, and None is returned.
        """
        try:
            result = await (self._ask_function(version) if self._by_function else self._ask_episodes(version))
        except _NotEvaluated as reason:
            self._listener.note(f"no evaluation of version {version}: {reason}")
            return None
        reward = mean([reward for each in result.sets for reward in each.rewards])
        length = mean([length for each in result.sets for length in each.lengths])
        is_logged = False
        if self._hooks is not None:
            metrics = {**result.metrics, "eval/reward": reward, "eval/response_length": length}
            is_logged = await self._hooks.has_logged_evaluation(version, result.sets, metrics)
        self._listener.evaluated(
            version, reward, length, result.parts, result.metrics, result.of_samples, is_logged=is_logged
        )
        return reward

    async def _ask_episodes(self, version: int) -> "_Result":
        """Run the episodes of each held-out prompt. Raises _NotEvaluated."""
        samples = self._samples
        results = await self._questions.ask(self._prompts, version, self._step_of(version), samples)
        rewards = [result.reward for result in results if result.reward is not None]
        if len(rewards) < len(results):
            raise _NotEvaluated(next(result.note for result in results if result.reward is None))
        by_set: dict[str, list[int]] = {}
        asked = [prompt for prompt in self._prompts for _ in range(samples)]
        for place, prompt in enumerate(asked):
            by_set.setdefault(prompt.source or HELD_OUT, []).append(place)
        sets = [
            EvaluatedSet(
                name,
                [rewards[place] for place in places],
                [results[place].response_length for place in places],
                [results[place].is_truncated for place in places],
                [asked[place] for place in places],
            )
            for name, places in by_set.items()
        ]
        parts = means_by_name(result.reward_parts for result in results)
        metrics = means_by_name(result.metrics for result in results)
        return _Result(sets, parts | _by_set(sets), metrics, _of_samples(sets, samples))

    async def _ask_function(self, version: int) -> "_Result":
        """Call the recipe's function for an evaluation in a collector. Raises _NotEvaluated."""
        result = await self._questions.ask_function(version)
        if not result.sets:
            raise _NotEvaluated(result.note)
        return _Result(result.sets, _by_set(result.sets), dict(result.metrics), {})


def _by_set(sets: Sequence[EvaluatedSet]) -> dict[str, float]:
    """Return the mean reward of each of several sets."""
    return {each.name: mean(each.rewards) for each in sets} if len(sets) > 1 else {}


def _of_samples(sets: Sequence[EvaluatedSet], samples: int) -> dict[str, float]:
    """Return avg@n and pass@k of all sets together, and of each of several. Empty for single samples."""
    if samples == 1:
        return {}
    rewards = {"": [reward for each in sets for reward in each.rewards]}
    if len(sets) > 1:
        rewards |= {f"/{each.name}": each.rewards for each in sets}
    scores = dict[str, float]()
    for name, of_set in rewards.items():
        scores[f"avg_at_{samples}{name}"] = mean(of_set)
        scores |= {f"pass_at_{k}{name}": value for k, value in passes(of_set, samples).items()}
    return scores


class _NotEvaluated(Exception):
    """Nothing is known of a version, and why."""


class _Result(NamedTuple):
    sets: list[EvaluatedSet]
    parts: Mapping[str, float]
    """Means besides that of the rewards, by the names of their metrics."""
    metrics: Mapping[str, float]
    """Means of what workflows have recorded, by name."""
    of_samples: Mapping[str, float]
    """avg@n and pass@k, by the names of their metrics."""
