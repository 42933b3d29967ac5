"""Hooks that see whole batches, as the training loop asks them: before a step, and beside it. They run in a
process of their own.

ready groups ──► RecordedEpisodes ──► training data: rewards, loss that is taken away ──► EncodedBatch
                        └─────────► log hook, beside the training step ──► whether Slipstream logs the batch
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from slipstream.backend.batch.train_batch import EncodedBatch
from slipstream.configs.schema import HooksConfig
from slipstream.rollout.collection.driver.collected_group import CollectedGroup
from slipstream.rollout.compat.hooks import (
    SERVE_BATCHES,
    BatchQuestion,
    HookSetup,
    RecordedEpisode,
    TrainingData,
)
from slipstream.rollout.system.programs.hook_process import LOG, HookProcess, HookProcessFailed
from slipstream.rollout.tokens.evaluated_set import EvaluatedSet
from slipstream.rollout.tokens.named_numbers import means_by_name

BESIDE_DRIVER = (
    "custom_reward_post_process",
    "custom_convert_samples_to_train_data",
    "custom_rollout_log_function",
    "custom_eval_rollout_log_function",
)
"""Settings of ``rollout.hooks`` whose code runs in the process beside the driver."""


class HookedBatches:
    """Asks a recipe's hooks about batches and evaluations. Single event loop; questions wait for one another.
    ``close`` it.
    """

    def __init__(self, hooks: HooksConfig, recipe: bytes, logs: Path, note: Callable[[str], None]) -> None:
        """``recipe``: all of it, as JSON: hooks see it."""
        named = hooks.named()
        self._paths = {setting: named[setting][0] for setting in BESIDE_DRIVER if setting in named}
        self._timeout_s = hooks.batch_timeout_s
        self._note = note
        setup = msgspec.msgpack.encode(HookSetup(recipe, self._paths))
        self._process = HookProcess(SERVE_BATCHES, setup, logs / LOG)
        self._logging: asyncio.Task[bool] | None = None

    async def begin(
        self, batch: EncodedBatch, groups: Sequence[CollectedGroup], step: int, waited_s: float
    ) -> EncodedBatch:
        """Return the batch of a step as the hooks make it, and begin to log it. Live trajectories stay as
        they are.

        Raises HookProcessFailed.
        """
        await self._give_up()
        episodes = records_of(batch, groups)
        data = await self._training_data(step, episodes)
        if "custom_rollout_log_function" in self._paths:
            metrics = means_by_name(episode.header.metrics for episode in episodes)
            logged = self._logged(
                BatchQuestion(
                    "custom_rollout_log_function",
                    step,
                    tuple(episodes),
                    metrics=metrics,
                    seconds=waited_s,
                )
            )
            self._logging = asyncio.create_task(logged, name="logging of a batch by a hook")
        return batch if data is None else with_training_data(batch, data)

    async def has_logged(self) -> bool:
        """Wait for the hook, at most as long as it may take. Return True if it has logged the last batch."""
        logging, self._logging = self._logging, None
        return logging is not None and await logging

    async def _training_data(
        self, rollout_id: int, episodes: Sequence[RecordedEpisode]
    ) -> TrainingData | None:
        """Return what the hooks make of a batch; None: the recipe names none. Raises HookProcessFailed."""
        for setting in ("custom_convert_samples_to_train_data", "custom_reward_post_process"):
            if setting in self._paths:
                value = await self._ask(BatchQuestion(setting, rollout_id, tuple(episodes)))
                return msgspec.convert(value, TrainingData)
        return None

    async def has_logged_evaluation(
        self, version: int, sets: Sequence[EvaluatedSet], metrics: Mapping[str, float]
    ) -> bool:
        """Return whether ``custom_eval_rollout_log_function`` has logged an evaluation."""
        setting = "custom_eval_rollout_log_function"
        return await self._logged(BatchQuestion(setting, version, sets=tuple(sets), metrics=dict(metrics)))

    async def _logged(self, question: BatchQuestion) -> bool:
        """Return whether a hook says that it has logged what the question is about."""
        if question.setting not in self._paths:
            return False
        try:
            return bool(await self._ask(question))
        except HookProcessFailed as error:
            self._note(f"{error}; Slipstream logs its own metrics")
            return False

    async def _ask(self, question: BatchQuestion) -> object:
        """Return what a hook says. Raises HookProcessFailed."""
        hook = f"rollout.hooks.{question.setting} ({self._paths[question.setting]})"
        request = await asyncio.to_thread(msgspec.msgpack.encode, question)
        return await self._process.ask(hook, request, self._timeout_s, "rollout.hooks.batch_timeout_s")

    async def close(self) -> None:
        """End what is under way."""
        await self._give_up()
        await self._process.close()

    async def _give_up(self) -> None:
        """Give up logging a batch whose step has failed."""
        logging, self._logging = self._logging, None
        if logging is not None:
            logging.cancel()
            await asyncio.wait({logging})


def records_of(batch: EncodedBatch, groups: Sequence[CollectedGroup]) -> list[RecordedEpisode]:
    """Return the episodes of ``groups``, which come first in ``batch``."""
    owners = [group for group in groups for _ in group.judged]
    ends = np.cumsum([0, *batch.sizes]).tolist()
    return [
        RecordedEpisode(group.id, group.prompt, batch.headers[place], batch.chunks[start:end].tobytes())
        for place, (group, (start, end)) in enumerate(zip(owners, pairwise(ends), strict=False))
    ]


def with_training_data(batch: EncodedBatch, data: TrainingData) -> EncodedBatch:
    """Return the batch with the hooks' rewards, and without the loss that they take away."""
    masks = data.masks
    return replace(
        batch,
        given_rewards=tuple(data.rewards),
        response_masks=None if masks is None else tuple(map(tuple, masks)),
    )
