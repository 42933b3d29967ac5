"""The critic: a value for every token, learned beside the policy, for advantages by GAE."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.megatron import model
from slipstream.backend.megatron.packed_model import ValueModel
from slipstream.backend.megatron.trained import Trained
from slipstream.backend.objective.value import value_loss
from slipstream.backend.trainer.learning_rate import learning_rate
from slipstream.backend.trainer.prepared import PreparedMicroBatch
from slipstream.backend.trainer.rehearsal import rehearse_critic
from slipstream.backend.trainer.skipping import Faults, SkippedUpdates, add_faults
from slipstream.bridge.model.spec import ModelSpec, value_spec
from slipstream.configs.schema import ActorConfig, CriticConfig


class Critic:
    """A model of values in the policy's layout, with its own optimizer.

    All ranks call its methods together.
    """

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
        """spec: the model to start from. actor: source of the layout and of the Megatron settings."""
        self._config = critic
        actor = actor.model_copy(update={"optimizer": critic.optimizer, "lora": None})
        self.trained = Trained(model.build_model(value_spec(spec), actor, dtype, device), actor, dtype)
        self._model = ValueModel(self.trained.parts, device)
        self._learning_rate = partial(learning_rate, critic.optimizer, run_steps=run_steps)

    def values(self, microbatches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Return values [M] of every micro-batch; None except on the last pipeline stage."""
        return self._model.values(microbatches)

    def rehearse(self, microbatches: Sequence[MicroBatch]) -> None:
        """Run the critic over equal ``microbatches``, and drop the gradients."""
        rehearse_critic(self.trained, self._model, microbatches)

    def update(
        self, minibatches: Sequence[Sequence[PreparedMicroBatch]], step: int, skipped: SkippedUpdates
    ) -> "CriticStatistics":
        """Make one optimizer update for each mini-batch, on the mean of ``value_loss`` over its tokens.

        Updates that are not finite are left out, and added to ``skipped``.
        """
        lr = self._learning_rate(step)
        statistics = CriticStatistics(lr)
        for number, minibatch in enumerate(minibatches):
            heads = [partial(self._loss, item) for item in minibatch]
            update = self.trained.update(self._model, [item.micro for item in minibatch], heads, lr)
            if update.succeeded:
                statistics.add_update(update.results, update.grad_norm)
            else:
                statistics.add_skipped()
                skipped.add("critic", number, self.trained, _faults(minibatch))
        self.trained.gather()
        return statistics

    def _loss(self, item: PreparedMicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of token losses, the number of tokens, and the statistics of a micro-batch."""
        assert item.targets is not None  # only the last stage, which has targets, computes a loss
        old_value_M, return_M = item.scores.value_M, item.targets.return_M
        assert old_value_M is not None and return_M is not None
        value_M = self._model.values_of(item.micro, output)
        loss_M, clipped_M = value_loss(value_M, old_value_M, return_M, clip=self._config.value_clip)
        sums = torch.stack(
            [
                x_M.detach().double().sum()
                for x_M in (
                    torch.ones_like(loss_M),
                    loss_M,
                    clipped_M.float(),
                    old_value_M,
                    return_M,
                    return_M.double() ** 2,
                    (return_M - old_value_M).double() ** 2,
                )
            ]
        )
        return loss_M.sum(), self._model.on_device(item.micro).count, sums


def _faults(minibatch: Sequence[PreparedMicroBatch]) -> Faults:
    """Return the trajectories of this rank with numbers that are not finite."""
    faults: Faults = {}
    for item in minibatch:
        targets = item.targets
        inputs = {
            "value": item.scores.value_M,
            "return": targets.return_M if targets is not None else None,
        }
        add_faults(faults, item.micro.trajectory_M, inputs)
    return faults


class CriticStatistics:
    """Collects the statistics of a training step's updates of the critic."""

    def __init__(self, lr: float) -> None:
        self._sums: Tensor | None = None
        self._grad_norms: list[float] = []
        self._skipped = 0
        self._lr = lr

    def add_update(self, results: Sequence[Tensor], grad_norm: float) -> None:
        """Add one optimizer update; ``results``: the sums of its micro-batches."""
        for sums in results:
            self._sums = sums if self._sums is None else self._sums + sums
        self._grad_norms.append(grad_norm)

    def add_skipped(self) -> None:
        """Count an update that no rank has made."""
        self._skipped += 1

    def reduced(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Return the metrics of the step. Collective over ``group``, the last stage's data-parallel ranks."""
        metrics = {"critic/lr": self._lr, "critic/skipped_updates": float(self._skipped)}
        if self._sums is None:
            return metrics
        dist.all_reduce(self._sums, group=group)
        tokens, loss, clipped, value, returns, square, error = self._sums.tolist()
        tokens = max(tokens, 1.0)
        variance = square / tokens - (returns / tokens) ** 2
        return metrics | {
            "critic/loss": loss / tokens,
            "critic/clip_fraction": clipped / tokens,
            "critic/value_mean": value / tokens,
            "critic/return_mean": returns / tokens,
            # 1: the values explain all of the returns' variance; 0: none. Undefined for equal returns.
            "critic/explained_variance": 1 - error / tokens / variance if variance > 1e-12 else float("nan"),
            "critic/grad_norm": sum(self._grad_norms) / len(self._grad_norms),
        }
