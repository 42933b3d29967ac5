"""Evaluation: greedy completions of held-out prompts, beside training."""

from collections.abc import Sequence

from slipstream.backend.driver.hooked_batches import HookedBatches
from slipstream.backend.driver.ports import RunListener
from slipstream.backend.monitor.units import mean
from slipstream.configs.schema.run import EvalConfig
from slipstream.rollout.collect.questions import EvaluationTasks
from slipstream.rollout.trajectory import Prompt, mean_parts


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

    async def run(self, version: int) -> None:
        """Evaluate, and tell the listener. An evaluation that fails is noted, and the run goes on."""
        if self._by_function:
            await self._run_function(version)
            return
        results = await self._questions.ask(self._prompts)
        rewards = [result.reward for result in results if result.reward is not None]
        if len(rewards) < len(results):
            failed = next(result for result in results if result.reward is None)
            self._listener.note(f"no evaluation of version {version}: {failed.note}")
            return
        lengths = [result.response_length for result in results]
        parts = mean_parts(result.reward_parts for result in results)
        is_logged = False
        if self._hooks is not None:
            metrics = {"eval/reward": mean(rewards), "eval/response_length": mean(lengths)}
            is_logged = await self._hooks.has_logged_evaluation(version, self._prompts, results, metrics)
        self._listener.evaluated(version, mean(rewards), mean(lengths), parts, is_logged=is_logged)

    async def _run_function(self, version: int) -> None:
        result = await self._questions.ask_function(version)
        if not result.sets:
            self._listener.note(f"no evaluation of version {version}: {result.note}")
            return
        rewards = [reward for each in result.sets for reward in each.rewards]
        lengths = [length for each in result.sets for length in each.lengths]
        parts = {each.name: mean(each.rewards) for each in result.sets} if len(result.sets) > 1 else {}
        is_logged = False
        if self._hooks is not None:
            metrics = {"eval/reward": mean(rewards), "eval/response_length": mean(lengths)}
            is_logged = await self._hooks.has_logged_sets(version, result.sets, metrics)
        self._listener.evaluated(version, mean(rewards), mean(lengths), parts, is_logged=is_logged)
