"""Names what is at fault when an update is skipped: trajectories, or else parameters."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.batch.skipped import FaultyTrajectory, SkippedUpdate
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.finite import gradient_names

if TYPE_CHECKING:  # Megatron can only be imported once the rank has joined its groups
    from slipstream.backend.megatron.trained import Trained

log = logging.getLogger(__name__)

Faults = dict[int, dict[str, None]]
"""By a trajectory's place in the batch: names of its numbers that are not finite, in order."""

REWARD = "reward"


def add_faults(
    faults: Faults, trajectory_M: np.ndarray, values_M: Mapping[str, Tensor | np.ndarray | None]
) -> None:
    """Add the trajectories that have values that are not finite, under the names of the values.

    ``trajectory_M``: place in the batch of the trajectory that each value belongs to. None: the recipe does
    not ask for the values, or this rank does not have them.
    """
    for name, value_M in values_M.items():
        if value_M is None:
            continue
        numbers_M = value_M.detach().float().cpu().numpy() if isinstance(value_M, Tensor) else value_M
        for place in np.unique(trajectory_M[~np.isfinite(numbers_M)]).tolist():
            faults.setdefault(place, {})[name] = None


class SkippedUpdates:
    """The updates that a rank's present step has skipped. All ranks call ``add`` together."""

    def __init__(self, reports: bool) -> None:
        """``reports``: this is the rank that speaks for all."""
        self._reports = reports
        self._of_step: list[SkippedUpdate] = []

    def begin(self, batch: TrainBatch) -> None:
        """Begin a step that trains on ``batch``."""
        self._batch = batch
        self._of_step = []

    def add(self, model: str, minibatch: int, trained: "Trained", faults: Faults) -> None:
        """Add an update of ``model`` that was skipped. Collective over all ranks.

        ``minibatch``: number within the step, from 0. ``faults``: those that this rank knows of.
        """
        by_rank: list[tuple[Faults, list[str]]] = [({}, [])] * dist.get_world_size()
        dist.all_gather_object(by_rank, (faults, gradient_names(trained.parts)))
        faulty = self._rewards()
        for of_rank, _ in by_rank:
            for place, names in of_rank.items():
                faulty.setdefault(place, {}).update(names)
        trajectories = tuple(
            FaultyTrajectory(place, int(self._batch.group_N[place]), tuple(names))
            for place, names in sorted(faulty.items())
        )
        gradients = tuple(f"rank {rank}: {name}" for rank, (_, names) in enumerate(by_rank) for name in names)
        skipped = SkippedUpdate(model, minibatch + 1, trajectories, () if trajectories else gradients)
        self._of_step.append(skipped)
        if self._reports:
            log.warning("step from version %d: %s", self._batch.version, skipped)

    def reported(self) -> list[SkippedUpdate] | None:
        """Return the skipped updates of the last step on the reporting rank, None elsewhere."""
        return self._of_step if self._reports else None

    def _rewards(self) -> Faults:
        """Return the trajectories of the batch whose rewards are not finite.

        One such reward makes advantages of its group, or of the whole batch, not finite, also in mini-batches
        that do not hold its trajectory.
        """
        rewards = [trajectory.reward for trajectory in self._batch.trajectories]
        return {
            place: {REWARD: None}
            for place, reward in enumerate(rewards)
            if reward is not None and not np.isfinite(reward)
        }
