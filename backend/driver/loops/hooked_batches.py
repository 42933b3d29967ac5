"""slime's hooks that see whole batches, as the training loop asks them: before a step, and beside it.

ready groups ──► RecordedEpisodes ──► training data: rewards, loss that is taken away ──► EncodedBatch
                        └─────────► log hook, beside the training step ──► whether Slipstream logs the batch
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from slipstream.backend.batch.train_batch import EncodedBatch
from slipstream.configs.schema import RunConfig
from slipstream.rollout.collection.driver.collected_group import CollectedGroup
from slipstream.rollout.collection.driver.gate import AdmissionGate
from slipstream.rollout.compat.slime.batch_hooks import BatchHooks, TrainingData, batch_hooks
from slipstream.rollout.compat.slime.batch_process import RecordedEpisode
from slipstream.rollout.tokens.evaluated_set import EvaluatedSet
from slipstream.rollout.tokens.named_numbers import means_by_name


class HookedBatches:
    """Asks a recipe's hooks about batches and evaluations. Single event loop. ``close`` it."""

    def __init__(self, hooks: BatchHooks) -> None:
        self._hooks = hooks
        self._logging: asyncio.Task[bool] | None = None

    async def begin(
        self, batch: EncodedBatch, groups: Sequence[CollectedGroup], gate: AdmissionGate, waited_s: float
    ) -> EncodedBatch:
        """Return the batch as the hooks make it, and begin to log it. Live trajectories stay as they are.

        Raises HookProcessFailed.
        """
        await self._give_up()
        episodes = records_of(batch, groups)
        data = await self._hooks.training_data(gate.step, episodes)
        if self._hooks.names("custom_rollout_log_function"):
            metrics = means_by_name(episode.header.metrics for episode in episodes)
            logging = self._hooks.log_batch(gate.step, episodes, metrics, waited_s)
            self._logging = asyncio.create_task(logging, name="logging of a batch by a hook")
        return batch if data is None else with_training_data(batch, data)

    async def has_logged(self) -> bool:
        """Wait for the hook, at most as long as it may take. Return True if it has logged the last batch."""
        logging, self._logging = self._logging, None
        return logging is not None and await logging

    async def has_logged_evaluation(
        self, version: int, sets: Sequence[EvaluatedSet], metrics: Mapping[str, float]
    ) -> bool:
        """Return whether the hook has logged an evaluation."""
        return await self._hooks.log_evaluation(version, sets, dict(metrics))

    async def close(self) -> None:
        """End what is under way."""
        await self._give_up()
        await self._hooks.close()

    async def _give_up(self) -> None:
        """Give up logging a batch whose step has failed."""
        logging, self._logging = self._logging, None
        if logging is not None:
            logging.cancel()
            await asyncio.wait({logging})


def hooked_batches(config: RunConfig, logs: Path, note: Callable[[str], None]) -> HookedBatches | None:
    """Return the hooks of a recipe that see whole batches; None: it names none."""
    hooks = batch_hooks(config, logs, note)
    return None if hooks is None else HookedBatches(hooks)


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
