"""The methods that a user's code on trainer ranks must have, and all their arguments.

A recipe names a class by import path. Each rank constructs it once, when it starts, before Megatron is set
up; the class may keep state, which a restart of the trainer loses. What it raises ends the run.

Legend: N trajectories of a batch, M tokens with loss of one micro-batch.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.objective.kl import ReferencePenalty
from slipstream.backend.objective.losses import TokenObjective, Tokens
from slipstream.backend.objective.policy_loss import PolicyLoss
from slipstream.backend.trainer.prepared import Scores

__all__ = [
    "BatchMetrics",
    "BatchTransform",
    "MicroBatch",
    "PolicyLoss",
    "ReferencePenalty",
    "Scores",
    "TokenAdvantage",
    "TokenObjective",
    "Tokens",
    "TrainBatch",
]


class TokenAdvantage(Protocol):
    """A term of the advantage: any class with this method. ``type: plugin`` in ``actor.advantage`` names it.

    It runs on every trainer rank of the last pipeline stage, for each micro-batch of the rank, before the
    first optimizer update of a training step. Ranks of a tensor- or context-parallel group call it with the
    same micro-batch, so that it must depend on nothing but its arguments.
    """

    def advantage(self, batch: TrainBatch, micro: MicroBatch, scores: Scores) -> Tensor | np.ndarray:
        """Return the term of each of the M tokens with loss of a micro-batch: floating-point [M].

        ``batch``: all trajectories of the training step, the same on every rank, so that a term can compare
        the trajectories of a group. ``micro.trajectory_M`` is the place of each token's trajectory in it, and
        M may be 0. ``scores``: what models say of the M tokens; its log-probs of the proximal policy are None
        in the first mini-batch unless the recipe sets ``needs_logprobs``. The term is multiplied by
        ``weight``, added to the other terms, and is a metric: ``advantage/plugin_mean``.
        """
        ...


class BatchTransform(Protocol):
    """Changes what a training step consumes: any class with this method. ``actor.transforms`` names it.

    It runs on every trainer rank, once for each training step, before trajectories are packed. All ranks
    must return the same batch: it must depend on nothing but its argument and what it was constructed with.
    """

    def transform(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch that is trained, which may be ``batch``.

        It may have other rewards (``batch.rewarded``), fewer trajectories (``batch.keeping``), or less loss
        (``dataclasses.replace`` of a trajectory's ``loss_mask_T``). It keeps the policy version, and at least
        one trajectory with loss for each mini-batch and data-parallel rank. Tokens must stay those that the
        policy has sampled: their log-probs are of them. The ledger and the metrics ``reward/...`` have the
        batch as it was collected.
        """
        ...


class BatchMetrics(Protocol):
    """Metrics of a training step: any class with this method. ``actor.metrics`` names it.

    It runs on the one trainer rank that reports, once for each training step, after the last optimizer
    update. The next step waits for it.
    """

    def metrics(self, batch: TrainBatch, trained: Mapping[str, float]) -> Mapping[str, float]:
        """Return finite numbers by name, which are logged as ``batch/NAME``.

        ``batch``: the batch that the step has trained on, after all transforms. ``trained``: the metrics of
        the step by their tags, such as ``train/loss``; ``slipstream metrics`` lists all tags.
        """
        ...
