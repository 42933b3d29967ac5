"""A reward model: one value per answer, learned from preferences, by the parts that the trainer is made of.

Both answers of a pair need not be on the same rank. A forward pass gives the values, all ranks exchange
them, and the loss of the second pass is linear in them, with the coefficients that make its gradient right.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch, TrainBatch
from slipstream.backend.megatron.export_plan import export_plan
from slipstream.backend.megatron.parallel import RankSpec, initialize
from slipstream.backend.objective.value import preference_loss
from slipstream.backend.trainer.checkpointed_rank import CheckpointedRank
from slipstream.backend.trainer.learning_rate import learning_rate
from slipstream.backend.trainer.minibatches import microbatches_of
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.files import write_hf
from slipstream.bridge.model.spec import value_spec
from slipstream.bridge.shards.export import export
from slipstream.configs.schema import RunConfig


class RewardModelRank(CheckpointedRank):
    """One rank. All are called with the same arguments, in the same order.

    Trajectories 2 i and 2 i + 1 of a batch are the chosen and the rejected answer of pair i. The value of an
    answer is that at its last token, as in Hugging Face's models for sequence classification.
    """

    def __init__(self, config: RunConfig, rank: RankSpec) -> None:
        self._config = config
        actor = config.actor
        device = initialize(rank, actor.parallel, seed=config.run.seed, timeout_s=config.run.step_timeout_s)
        from megatron.core import parallel_state

        from slipstream.backend.megatron import checkpoint, model
        from slipstream.backend.megatron.packed_model import ValueModel
        from slipstream.backend.megatron.trained import Trained

        self._groups = parallel_state
        self._spec = value_spec(model_spec(config.model.path))
        dtype = getattr(torch, config.model.dtype)
        parts = model.build_model(self._spec, actor, dtype, device, seed=config.run.seed)
        self._parameters = [model.named_shards(part) for part in parts]
        self._trained = Trained(parts, actor, dtype)
        self._model = ValueModel(self._trained.parts, device)
        self._plan = export_plan(config, self._spec)
        self._checkpoints = checkpoint.RankCheckpoints(
            {checkpoint.POLICY: self._trained},
            None,
            actor,
            self._spec.geometry,
            seed=config.run.seed,
            finish_timeout_s=config.run.step_timeout_s / 2,
        )

    def train(self, batch: TrainBatch) -> dict[str, float] | None:
        """Make one optimizer update. Return its metrics on the reporting rank, None elsewhere."""
        rank = self._groups.get_data_parallel_rank()
        [microbatches], metrics = microbatches_of(
            self._config, self._spec.geometry, batch, self.step, rank=rank
        )
        last_stage = self._groups.is_pipeline_last_stage()
        values = self._model.evaluate(microbatches, self._values_of)
        gradient_N: Any = None
        if last_stage:
            gradient_N, of_pairs = self._gradient(batch, microbatches, values)
            metrics |= of_pairs
        optimizer = self._config.actor.optimizer
        lr = learning_rate(optimizer, self.step, run_steps=self._config.run.steps)
        heads = [partial(self._loss, micro, gradient_N) for micro in microbatches]
        update = self._trained.update(self._model, microbatches, heads, lr)
        self._trained.gather()
        metrics["train/grad_norm"] = update.grad_norm
        metrics["train/lr"] = lr
        metrics["train/tokens"] = float(sum(len(trajectory.tokens_T) for trajectory in batch.trajectories))
        self.step += 1
        first = self._groups.get_tensor_model_parallel_rank() == self._groups.get_data_parallel_rank() == 0
        return metrics if last_stage and first else None

    def export_hf(self, folder: Path) -> None:
        """Write the model as an HF checkpoint for sequence classification with one label."""
        buckets = export(self._plan, self._parameters, dist.get_rank())
        if write_hf(buckets, self._spec.path, folder):
            file = folder / "config.json"
            hf = json.loads(file.read_text())
            names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in hf["architectures"]]
            hf |= {"architectures": names, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
            file.write_text(json.dumps(hf, indent=2) + "\n")

    def _values_of(self, micro: MicroBatch, output_1T1: Tensor) -> Tensor:
        """Of the micro-batch's trajectories that have tokens to learn, in order of the pack."""
        position, _ = _ends(micro)
        return output_1T1[0, :, 0].index_select(0, self._model.tensor(position))

    def _gradient(
        self, batch: TrainBatch, microbatches: Sequence[MicroBatch], values: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        """d loss / d value of each trajectory [N], and metrics. Collective over the data-parallel ranks."""
        value_N = values[0].new_zeros(len(batch.trajectories))
        for micro, value in zip(microbatches, values, strict=True):
            value_N[self._model.tensor(_ends(micro)[1])] = value
        dist.all_reduce(value_N, group=self._groups.get_data_parallel_group())
        with torch.enable_grad():
            value_N.requires_grad_()
            loss = preference_loss(value_N[0::2], value_N[1::2]).mean()
            (gradient_N,) = torch.autograd.grad(loss, value_N)
        right = (value_N[0::2] > value_N[1::2]).float().mean()
        return gradient_N, {"train/loss": loss.item(), "train/preference_accuracy": right.item()}

    def _loss(self, micro: MicroBatch, gradient_N: Tensor, output: Tensor) -> tuple[Tensor, Tensor, Any]:
        """As Megatron's per-token loss asks for: sum, count, statistics."""
        value, (_, trajectory) = self._values_of(micro, output), _ends(micro)
        total = (gradient_N[self._model.tensor(trajectory)] * value).sum()
        count = torch.tensor(len(value), dtype=torch.int, device=value.device)
        # Megatron divides by the answers of all ranks; the mean over pairs is in the gradient already.
        return total * len(gradient_N), count, None


def _ends(micro: MicroBatch) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the trajectories' last tokens, and which trajectories of the batch they are."""
    return micro.index_M[micro.is_last_M] + 1, micro.trajectory_M[micro.is_last_M]
