"""Hooks that see whole batches and evaluations: asked in a process of their own."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.configs.schema import RunConfig
from slipstream.rollout.compat.slime.batch_process import BatchQuestion, HookSetup, RecordedEpisode
from slipstream.rollout.system.programs.hook_process import LOG, HookProcess, HookProcessFailed
from slipstream.rollout.tokens.evaluated_set import EvaluatedSet

BESIDE_DRIVER = (
    "custom_reward_post_process",
    "custom_convert_samples_to_train_data",
    "custom_rollout_log_function",
    "custom_eval_rollout_log_function",
)
"""Settings of ``rollout.hooks`` whose code runs in this process."""

SERVE = "slipstream.rollout.compat.slime.batch_process.serve"


class TrainingData(msgspec.Struct, frozen=True):
    """A batch as hooks want it trained; the lists are over all of its trajectories."""

    rewards: list[float]
    masks: list[list[int]] | None = None
    """1 where a response token keeps its loss; None: all do."""


class BatchHooks:
    """The hooks of one recipe. Single event loop; questions wait for one another. ``close`` it."""

    def __init__(self, config: RunConfig, logs: Path, note: Callable[[str], None]) -> None:
        assert config.rollout.hooks is not None
        named = config.rollout.hooks.named()
        self._paths = {setting: named[setting][0] for setting in BESIDE_DRIVER if setting in named}
        self._timeout_s = config.rollout.hooks.batch_timeout_s
        self._note = note
        setup = msgspec.msgpack.encode(HookSetup(config.model_dump_json().encode(), self._paths))
        self._process = HookProcess(SERVE, setup, logs / LOG)

    def names(self, setting: str) -> bool:
        """Return whether the recipe names a hook for ``setting``."""
        return setting in self._paths

    async def training_data(
        self, rollout_id: int, episodes: Sequence[RecordedEpisode]
    ) -> TrainingData | None:
        """Return what the hooks make of a batch; None: the recipe names none. Raises HookProcessFailed."""
        for setting in ("custom_convert_samples_to_train_data", "custom_reward_post_process"):
            if setting in self._paths:
                value = await self._ask(BatchQuestion(setting, rollout_id, tuple(episodes)))
                return msgspec.convert(value, TrainingData)
        return None

    async def log_batch(
        self, rollout_id: int, episodes: Sequence[RecordedEpisode], metrics: dict[str, float], seconds: float
    ) -> bool:
        """Return whether ``custom_rollout_log_function`` says that it has logged the batch itself."""
        setting = "custom_rollout_log_function"
        return await self._logged(
            BatchQuestion(setting, rollout_id, tuple(episodes), metrics=metrics, seconds=seconds)
        )

    async def log_evaluation(
        self, rollout_id: int, sets: Sequence[EvaluatedSet], metrics: dict[str, float]
    ) -> bool:
        """Return whether ``custom_eval_rollout_log_function`` says that it has logged the evaluation."""
        setting = "custom_eval_rollout_log_function"
        return await self._logged(BatchQuestion(setting, rollout_id, sets=tuple(sets), metrics=metrics))

    async def _logged(self, question: BatchQuestion) -> bool:
        if question.setting not in self._paths:
            return False
        try:
            return bool(await self._ask(question))
        except HookProcessFailed as error:
            self._note(f"{error}; Slipstream logs its own metrics")
            return False

    async def _ask(self, question: BatchQuestion) -> Any:
        """Return what a hook says. Raises HookProcessFailed."""
        hook = f"rollout.hooks.{question.setting} ({self._paths[question.setting]})"
        request = await asyncio.to_thread(msgspec.msgpack.encode, question)
        return await self._process.ask(hook, request, self._timeout_s, "rollout.hooks.batch_timeout_s")

    async def close(self) -> None:
        """End the process, if there is one."""
        await self._process.close()


def batch_hooks(config: RunConfig, logs: Path, note: Callable[[str], None]) -> BatchHooks | None:
    """Return the hooks of a recipe that see whole batches; None: it names none."""
    hooks = config.rollout.hooks
    if hooks is None or not any(setting in hooks.named() for setting in BESIDE_DRIVER):
        return None
    return BatchHooks(config, logs, note)
