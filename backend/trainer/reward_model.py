"""A reward model: one value per completion, learned from preferences.

The two completions of a pair may be on different ranks. A forward pass gives the values, all ranks exchange
them, and the loss of the second pass is linear in them, with the coefficients that give the right gradient.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.batch.skipped import SkippedUpdate
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.export_plan import export_plan
from slipstream.backend.megatron.finite import require_finite
from slipstream.backend.megatron.parallel import RankSpec, initialize
from slipstream.backend.objective.value import preference_loss
from slipstream.backend.trainer.checkpointed_rank import CheckpointedRank
from slipstream.backend.trainer.learning_rate import learning_rate
from slipstream.backend.trainer.minibatches import microbatches_of
from slipstream.backend.trainer.skipping import Faults, SkippedUpdates, add_faults
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.files import write_hf
from slipstream.bridge.model.spec import value_spec
from slipstream.bridge.shards.export import export
from slipstream.configs.schema import RunConfig
from slipstream.rollout.system import plugins


class RewardModelRank(CheckpointedRank):
    """One rank. All ranks are called with the same arguments, in the same order.

    Trajectories 2 i and 2 i + 1 of a batch are the chosen and the rejected completion of pair i. The value of
    a completion is the value at its last token, as in HF's models for sequence classification.
    """

    def __init__(self, config: RunConfig, rank: RankSpec) -> None:
        self._config = config
        actor = config.actor
        device = initialize(rank, actor.parallel, seed=config.run.seed, timeout_s=config.run.step_timeout_s)
        # Megatron can only be imported now.
        from slipstream.backend.megatron import checkpoint, groups, model
        from slipstream.backend.megatron.packed_model import ValueModel
        from slipstream.backend.megatron.trained import Trained

        self._groups = groups.groups
        self._reports = groups.reports()
        self._skipped = SkippedUpdates(self._reports)
        self._require_finite = partial(require_finite, device=device)
        self._spec = value_spec(model_spec(config.model.path, plugins.resolved(config.model.families)))
        dtype = getattr(torch, config.model.dtype)
        parts = model.build_model(self._spec, actor, dtype, device, seed=config.run.seed)
        self._parameters = [model.named_shards(part) for part in parts]
        self._trained = Trained(parts, actor, dtype)
        self._model = ValueModel(self._trained.parts, device)
        self._plan = export_plan(actor, config.model.dtype, config.weights.transport, self._spec)
        self._checkpoints = checkpoint.RankCheckpoints(
            {checkpoint.POLICY: self._trained},
            None,
            actor,
            self._spec.geometry,
            seed=config.run.seed,
            finish_timeout_s=config.run.step_timeout_s / 2,
        )

    def train(self, batch: TrainBatch) -> dict[str, float] | None:
        """Make one optimizer update. Return its metrics on the reporting rank, None elsewhere.

        An update that is not finite is left out on all ranks, and counted.
        """
        self._skipped.begin(batch)
        rank = self._groups.get_data_parallel_rank()
        [microbatches], metrics = microbatches_of(
            self._config.actor, self._spec.geometry, batch, self._config.run.seed, self.step, rank=rank
        )
        values = self._model.evaluate(microbatches, self._values_of)
        gradient_N: Tensor | None = None
        of_pairs: dict[str, float] = {}
        if self._groups.is_pipeline_last_stage():
            gradient_N, of_pairs = self._gradient(batch, microbatches, values)
        optimizer = self._config.actor.optimizer
        lr = learning_rate(optimizer, self.step, run_steps=self._config.run.total_steps)
        heads = [partial(self._loss, micro, gradient_N) for micro in microbatches]
        update = self._trained.update(self._model, microbatches, heads, lr)
        self._trained.gather()
        if update.succeeded:
            metrics |= of_pairs | {"train/grad_norm": update.grad_norm}
        else:
            self._skipped.add("reward model", 0, self._trained, _faults(microbatches, values))
        metrics["train/skipped_updates"] = float(not update.succeeded)
        metrics["train/lr"] = lr
        metrics["train/tokens"] = float(sum(len(trajectory.tokens_T) for trajectory in batch.trajectories))
        self.step += 1
        return metrics if self._reports else None

    def skipped_updates(self) -> list[SkippedUpdate] | None:
        """Return the updates that the last step has skipped, on the reporting rank, None elsewhere."""
        return self._skipped.reported()

    def export_hf(self, folder: Path) -> None:
        """Write the model as an HF checkpoint for sequence classification with one label.

        Raises NotFinite on every rank, before anything is written, unless all weights are finite.
        """
        self._require_finite("the weights of the reward model", self._parameters)
        buckets = export(self._plan, self._parameters, dist.get_rank())
        if write_hf(buckets, self._spec.path, folder, kept=self._spec.kept):
            file = folder / "config.json"
            hf = json.loads(file.read_text())
            names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in hf["architectures"]]
            hf |= {"architectures": names, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
            file.write_text(json.dumps(hf, indent=2) + "\n")

    def _values_of(self, micro: MicroBatch, output_1T1: Tensor) -> Tensor:
        """Return the value of each trajectory that has tokens with loss, in the order of the pack."""
        return output_1T1[0, :, 0].index_select(0, self._model.on_device(micro).last_N)

    def _gradient(
        self, batch: TrainBatch, microbatches: Sequence[MicroBatch], values: Sequence[Tensor | None]
    ) -> tuple[Tensor, dict[str, float]]:
        """Return d loss / d value of each trajectory, [N], and metrics. Collective over data parallelism."""
        known = [value for value in values if value is not None]
        value_N = known[0].new_zeros(len(batch.trajectories))
        for micro, value in zip(microbatches, known, strict=True):
            value_N[self._model.on_device(micro).trajectory_N] = value
        dist.all_reduce(value_N, group=self._groups.get_data_parallel_group())
        with torch.enable_grad():
            value_N.requires_grad_()
            loss = preference_loss(value_N[0::2], value_N[1::2]).mean()
            (gradient_N,) = torch.autograd.grad(loss, value_N)
        right = (value_N[0::2] > value_N[1::2]).float().mean()
        return gradient_N, {"train/loss": loss.item(), "train/preference_accuracy": right.item()}

    def _loss(
        self, micro: MicroBatch, gradient_N: Tensor | None, output: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        """Return the sum of the losses of the trajectories, their number, and no statistics."""
        assert gradient_N is not None  # only the last stage, which has it, computes a loss
        value, batch = self._values_of(micro, output), self._model.on_device(micro)
        total = (gradient_N[batch.trajectory_N] * value).sum()
        # Megatron divides by the completions of all ranks; the gradient is of the mean over pairs already.
        return total * len(gradient_N), batch.trajectories, None


def _faults(microbatches: Sequence[MicroBatch], values: Sequence[Tensor | None]) -> Faults:
    """Return the trajectories of this rank whose values are not finite."""
    faults: Faults = {}
    for micro, value in zip(microbatches, values, strict=True):
        add_faults(faults, micro.trajectory_M[micro.is_last_M], {"value": value})
    return faults
