"""One training step on one rank: scores, advantages, loss, optimizer; and the way out for the weights."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.batch.flops import forward_flops
from slipstream.backend.batch.micro_batch import MicroBatch, TrainBatch, assemble, check_staleness
from slipstream.backend.megatron.export_plan import export_plan
from slipstream.backend.megatron.parallel import RankSpec, initialize
from slipstream.backend.objective import kl
from slipstream.backend.objective.correction import interpolated_logp
from slipstream.backend.objective.losses import Tokens, token_losses
from slipstream.backend.objective.statistics import StepStatistics, token_statistics
from slipstream.backend.trainer.advantages import Scores, Targets, find_targets
from slipstream.backend.trainer.checkpointed_rank import CheckpointedRank
from slipstream.backend.trainer.learning_rate import learning_rate
from slipstream.backend.trainer.minibatches import microbatches_of
from slipstream.backend.trainer.publishing import make_publisher
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.files import write_hf
from slipstream.bridge.publish.publisher import Publisher
from slipstream.bridge.publish.report import PublishReport
from slipstream.bridge.shards.export import export
from slipstream.bridge.shards.plan import SENDER
from slipstream.configs.schema import RunConfig
from slipstream.rollout.engine.client import EngineAddress, EngineClient
from slipstream.rollout.trajectory import Completion, Finish, Span, TrajectoryBuilder


class TrainerRank(CheckpointedRank):
    """One rank of the trainer. All ranks are called with the same arguments, in the same order."""

    def __init__(self, config: RunConfig, rank: RankSpec) -> None:
        self._config = config
        self._address = rank.address
        self._device = initialize(
            rank, config.actor.parallel, seed=config.run.seed, timeout_s=config.run.step_timeout_s
        )
        from megatron.core import parallel_state

        from slipstream.backend.megatron import checkpoint, head, model
        from slipstream.backend.megatron.packed_model import LanguageModel
        from slipstream.backend.megatron.resting import Resting
        from slipstream.backend.megatron.trained import Trained
        from slipstream.backend.trainer.scoring import Scorers

        self._groups = parallel_state
        self._spec = model_spec(config.model.path)
        dtype = getattr(torch, config.model.dtype)
        actor = config.actor
        parts = model.build_model(self._spec, actor, dtype, self._device, seed=config.run.seed)
        head.pass_on_hidden_states(parts)
        self._trained = Trained(parts, actor, dtype)
        self._policy = LanguageModel(
            self._trained.parts,
            self._device,
            vocab=self._spec.geometry.vocab,
            float32_logits=actor.fp32_lm_head,
        )
        self._parameters = [model.named_shards(part) for part in parts]
        self._learning_rate = partial(learning_rate, actor.optimizer, run_steps=config.run.steps)
        self._scorers = Scorers(config, dtype, self._device)
        trained = {checkpoint.POLICY: self._trained}
        if self._scorers.critic is not None:
            trained[checkpoint.CRITIC] = self._scorers.critic.trained
        self._checkpoints = checkpoint.RankCheckpoints(
            trained,
            self._scorers.average,
            actor,
            self._spec.geometry,
            seed=config.run.seed,
            # The other ranks wait in a collective meanwhile, which must not time out first.
            finish_timeout_s=config.run.step_timeout_s / 2,
        )
        self._resting = Resting(self._device)
        self._plan = export_plan(config, self._spec)
        self._publisher: Publisher | None = None

    # ---- one training step

    def train(self, batch: TrainBatch) -> dict[str, float] | None:
        """Train one step on ``batch``. Return its metrics on the reporting rank, None elsewhere.

        Raises StalenessViolation when a token that carries loss is outside the bound: the last gate, at the
        place where it matters.
        """
        check_staleness(batch, self._config.rollout.max_head_offpolicyness)
        minibatches, metrics = self.microbatches(batch)
        microbatches = [micro for minibatch in minibatches for micro in minibatch]
        scores = self._scorers.ask(self._policy, microbatches)
        targets: list[Any] = [None] * len(microbatches)
        if self._is_last_stage:
            group = self._groups.get_data_parallel_group()
            targets = find_targets(self._config, batch, microbatches, scores, group)
        metrics["train/tflop"] = self._flops(batch) / 1e12
        metrics["train/tokens"] = float(sum(trajectory.response_length for trajectory in batch.trajectories))
        metrics |= self._train_policy(minibatches, scores, targets)
        metrics |= self._train_critic(minibatches, scores, targets)
        self._scorers.follow(self._parameters)
        self.step += 1
        return metrics if self._reports else None

    def microbatches(self, batch: TrainBatch) -> tuple[list[list[MicroBatch]], dict[str, float]]:
        """As ``microbatches_of``, of this rank in its present step."""
        rank = self._groups.get_data_parallel_rank()
        return microbatches_of(self._config, self._spec.geometry, batch, self.step, rank=rank)

    def _flops(self, batch: TrainBatch) -> float:
        """What the policy's model asks for in a step, of all ranks together."""
        length_N = np.array([len(trajectory.tokens_T) for trajectory in batch.trajectories])
        passes = 3 + self._config.actor.recompute_logprobs  # a backward pass counts as two forward ones
        return passes * float(forward_flops(self._spec.geometry, length_N).sum())

    def _train_policy(
        self, minibatches: list[list[MicroBatch]], scores: list[Scores], targets: list[Targets | None]
    ) -> dict[str, float]:
        """One optimizer update for each mini-batch; metrics of the step on the last stage."""
        critic = self._config.critic
        if critic is not None and self.step < critic.warmup_steps:
            return {}
        statistics, lr = StepStatistics(), self._learning_rate(self.step)
        remaining = zip(scores, targets, strict=True)
        for minibatch in minibatches:
            heads = [
                partial(self._loss, micro, score, target)
                for micro, (score, target) in zip(minibatch, remaining, strict=False)
            ]
            update = self._trained.update(self._policy, minibatch, heads, lr)
            statistics.add_update(
                update.results if self._is_last_stage else [],
                grad_norm=update.grad_norm,
                lr=lr,
                succeeded=update.succeeded,
            )
        self._trained.gather()
        return statistics.reduced(self._groups.get_data_parallel_group()) if self._is_last_stage else {}

    def _train_critic(
        self, minibatches: list[list[MicroBatch]], scores: list[Scores], targets: list[Targets | None]
    ) -> dict[str, float]:
        """The same for the critic, if there is one."""
        critic = self._scorers.critic
        if critic is None:
            return {}
        found = critic.train(minibatches, scores, targets, self.step)
        return found.reduced(self._groups.get_data_parallel_group()) if self._is_last_stage else {}

    def logprobs(self, ids: Sequence[int]) -> list[float] | None:
        """Log-probs of ids[1:] given what precedes them, at temperature 1, under the present weights.

        The result on the reporting rank, None elsewhere.
        """
        n = len(ids) - 1
        text = TrajectoryBuilder(ids[:1])
        text.add_completion(Completion(tuple(ids[1:]), (0.0,) * n, (Span(0, 0, n),), Finish.LENGTH))
        batch = TrainBatch(0, (text.build(),), np.zeros(1, np.int64))
        parallel = self._config.actor.parallel
        micro = assemble(batch, [0], parallel.length_multiple, each=parallel.trajectory_multiple)
        times = self._config.actor.parallel.microbatch_multiple
        found = self._policy.log_probs([micro] * times, temperature=1.0)
        return found[0].tolist() if self._reports else None

    def _loss(
        self, micro: MicroBatch, scores: Scores, targets: Targets, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """Sum of token losses, token count, statistics: what Megatron's per-token loss asks for."""
        actor, tensor = self._config.actor, self._policy.tensor
        logp_M, entropy_M = self._policy.logprob_and_entropy(
            micro,
            hidden,
            self._config.rollout.sampling.temperature,
            entropy_gradient=actor.entropy_bonus > 0,
        )
        behaviour_M, lag_M = tensor(micro.behaviour_logp_M), tensor(micro.lag_M)
        proximal_M = scores.proximal_M
        if actor.interpolate_logprobs:
            proximal_M = interpolated_logp(logp_M, behaviour_M, lag_M)
        tokens = Tokens(
            logp_M=logp_M,
            behaviour_logp_M=behaviour_M,
            proximal_logp_M=proximal_M,
            advantage_M=targets.advantage_M.to(logp_M),
            lag_M=lag_M,
            owner_M=tensor(micro.owner_M),
            owners=micro.owners,
        )
        loss = token_losses(actor, tokens)
        share_M = tensor(micro.share_M)
        total = (share_M * loss.loss_T).sum()
        if actor.entropy_bonus > 0:
            total = total - actor.entropy_bonus * (share_M * entropy_M).sum()
        if actor.kl is not None and actor.kl.where == "loss":
            kl_M = kl.in_loss(logp_M, scores.reference_M, behaviour_M, actor.kl.estimator)
            total = total + actor.kl.coefficient * (share_M * kl_M).sum()
        measured = token_statistics(
            loss=loss,
            tokens=tokens,
            share_M=share_M,
            entropy_M=entropy_M.detach(),
            reference_M=scores.reference_M,
            teacher_M=scores.teacher_M,
            recomputed=actor.recompute_logprobs,
            weight_cap=actor.correction.weight_cap if actor.use_decoupled_loss else None,
        )
        count = self._policy.count(micro)
        return total, count, measured

    @property
    def _is_last_stage(self) -> bool:
        return self._groups.is_pipeline_last_stage()

    @property
    def _reports(self) -> bool:
        first_of_tensor = self._groups.get_tensor_model_parallel_rank() == 0
        first_of_data = self._groups.get_data_parallel_rank(with_context_parallel=True) == 0
        return self._is_last_stage and first_of_tensor and first_of_data

    # ---- taking turns with the engines

    def rest(self, keep_weights: bool) -> None:
        """Give the device's memory up, but for the weights if they are still to be published. Until ``wake``
        the rank can then be asked for nothing else."""
        self._trained.rest(self._resting, keep_weights=keep_weights)
        if self._scorers.critic is not None:
            self._scorers.critic.trained.rest(self._resting)

    def wake(self) -> None:
        """Have it back, as it was."""
        self._resting.wake()

    # ---- the weights' way out

    def publish(self, version: int, engines: Sequence[EngineAddress]) -> PublishReport | None:
        """Send the weights to ``engines`` as ``version``. Return the report on the sender, None elsewhere."""
        buckets = self._export()
        if dist.get_rank() != SENDER:
            for _ in buckets:
                """Sends its parts."""
            return None
        if self._publisher is None:
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            self._publisher = make_publisher(self._config, self._plan, address=self._address, backend=backend)
        return asyncio.run(_publish(self._publisher, version, engines, buckets))

    def export_hf(self, folder: Path) -> None:
        """Write the present weights as an HF checkpoint directory."""
        write_hf(self._export(), self._spec.path, folder)

    def _export(self) -> Iterator[FlatBucket | None]:
        return export(self._plan, self._parameters, dist.get_rank())


async def _publish(
    publisher: Publisher, version: int, engines: Sequence[EngineAddress], buckets: Iterator[Any]
) -> PublishReport:
    clients = [EngineClient(address) for address in engines]
    try:
        return await publisher.publish(version, clients, buckets)
    finally:
        for client in clients:
            await client.close()
