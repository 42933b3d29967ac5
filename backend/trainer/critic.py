"""The critic: a value of every token, learned beside the policy, for advantages by GAE."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.megatron import model
from slipstream.backend.megatron.packed_model import ValueModel
from slipstream.backend.megatron.trained import Trained
from slipstream.backend.objective.value import value_loss
from slipstream.backend.trainer.advantages import Scores, Targets
from slipstream.backend.trainer.learning_rate import learning_rate
from slipstream.bridge.model.spec import ModelSpec, value_spec
from slipstream.configs.schema import ActorConfig, CriticConfig


class Critic:
    """In the policy's layout, with an optimizer of its own. All ranks call its methods together."""

    def __init__(
        self,
        critic: CriticConfig,
        actor: ActorConfig,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        *,
        run_steps: int,
    ) -> None:
        """``spec``: of the model to start from. ``actor``: for its layout and its Megatron settings."""
        self._config = critic
        actor = actor.model_copy(update={"optimizer": critic.optimizer, "lora": None})
        self.trained = Trained(model.build_model(value_spec(spec), actor, dtype, device), actor, dtype)
        self._model = ValueModel(self.trained.parts, device)
        self._learning_rate = partial(learning_rate, critic.optimizer, run_steps=run_steps)

    def values(self, microbatches: Sequence[MicroBatch]) -> list[Tensor | None]:
        return self._model.values(microbatches)

    def train(
        self,
        minibatches: Sequence[Sequence[MicroBatch]],
        scores: Sequence[Scores],
        targets: Sequence[Targets | None],
        step: int,
    ) -> "CriticStatistics":
        """One optimizer update for each mini-batch: the mean over its tokens of ``value_loss``."""
        lr = self._learning_rate(step)
        found = CriticStatistics(lr)
        remaining = zip(scores, targets, strict=True)
        for minibatch in minibatches:
            heads = [
                partial(self._loss, micro, score, target)
                for micro, (score, target) in zip(minibatch, remaining, strict=False)
            ]
            update = self.trained.update(self._model, minibatch, heads, lr)
            found.add_update(update.results, update.grad_norm)
        self.trained.gather()
        return found

    def _loss(
        self, micro: MicroBatch, scores: Scores, targets: Targets, output: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """As Megatron's per-token loss asks for: sum, count, statistics."""
        value_M, old_value_M = self._model.values_of(micro, output), scores.value_M
        loss_M, clipped_M = value_loss(value_M, old_value_M, targets.return_M, clip=self._config.value_clip)
        sums = torch.stack(
            [
                x_M.detach().double().sum()
                for x_M in (
                    torch.ones_like(loss_M),
                    loss_M,
                    clipped_M.float(),
                    old_value_M,
                    targets.return_M,
                    targets.return_M.double() ** 2,
                    (targets.return_M - old_value_M).double() ** 2,
                )
            ]
        )
        return loss_M.sum(), self._model.count(micro), sums


class CriticStatistics:
    """Of a training step's updates of the critic."""

    def __init__(self, lr: float) -> None:
        self._sums: Tensor | None = None
        self._grad_norms: list[float] = []
        self._lr = lr

    def add_update(self, results: Sequence[Tensor | None], grad_norm: float) -> None:
        for sums in results:
            if sums is not None:
                self._sums = sums if self._sums is None else self._sums + sums
        self._grad_norms.append(grad_norm)

    def reduced(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Metrics of the step. Collective over ``group``, the data-parallel ranks of the last stage."""
        assert self._sums is not None
        dist.all_reduce(self._sums, group=group)
        tokens, loss, clipped, value, returns, square, error = self._sums.tolist()
        tokens = max(tokens, 1.0)
        variance = square / tokens - (returns / tokens) ** 2
        return {
            "critic/loss": loss / tokens,
            "critic/clip_fraction": clipped / tokens,
            "critic/value_mean": value / tokens,
            "critic/return_mean": returns / tokens,
            # 1: all of the returns' variance is foreseen; 0: none. Of returns that do not vary: nothing.
            "critic/explained_variance": 1 - error / tokens / variance if variance > 1e-12 else float("nan"),
            "critic/grad_norm": sum(self._grad_norms) / len(self._grad_norms),
            "critic/lr": self._lr,
        }
