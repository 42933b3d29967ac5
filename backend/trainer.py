"""One training step on one rank: recompute, advantages, loss, optimizer; and the way out for the weights."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from backend.batching import MicroBatch, TrainBatch, assemble, check_staleness
from backend.context import ContextShare, share_of
from backend.flops import forward_flops
from backend.learning_rate import learning_rate
from backend.megatron.parallel import RankSpec, initialize
from backend.objective.advantage import ADVANTAGES, overlong_penalty
from backend.objective.averaging import token_shares
from backend.objective.correction import interpolated_logp
from backend.objective.losses import Tokens, token_losses
from backend.objective.statistics import StepStatistics, token_statistics
from backend.packing import balance, schedule
from backend.planning import export_plan
from backend.publishing import make_publisher
from backend.trainer_result import StepResult
from bridge.export import FlatBucket, export
from bridge.families import model_spec
from bridge.hf_files import write_hf
from bridge.plan import SENDER
from bridge.publish import Publisher, PublishReport
from configs.schema import RunConfig
from rollout.engine.client import EngineAddress, EngineClient
from rollout.trajectory import Completion, Finish, Span, TrajectoryBuilder


class TrainerRank:
    """One rank of the trainer. All ranks are called with the same arguments, in the same order."""

    def __init__(self, config: RunConfig, rank: RankSpec) -> None:
        self._config = config
        self._address = rank.address
        self._device = initialize(
            rank, config.actor.parallel, seed=config.run.seed, timeout_s=config.run.step_timeout_s
        )
        from megatron.core import parallel_state

        from backend.megatron import head, model
        from backend.megatron.checkpoint import RankCheckpoints

        self._groups = parallel_state
        self._spec = model_spec(config.model.path)
        dtype = getattr(torch, config.model.dtype)
        actor = config.actor
        parts = model.build_model(self._spec, actor, dtype, self._device, seed=config.run.seed)
        head.pass_on_hidden_states(parts)
        self._parts = model.wrap_ddp(parts, actor)
        self._optimizer = model.build_optimizer(self._parts, actor, dtype)
        self._gather_weights = partial(model.gather_weights, self._parts)
        self._parameters = [model.named_shards(part.module) for part in self._parts]
        self._learning_rate = partial(learning_rate, actor.optimizer, run_steps=config.run.steps)
        self._checkpoints = RankCheckpoints(
            self._parts,
            self._optimizer,
            actor,
            self._spec.geometry,
            seed=config.run.seed,
            # The other ranks wait in a collective meanwhile, which must not time out first.
            finish_timeout_s=config.run.step_timeout_s / 2,
        )
        self.step = 0
        """Training steps done. What is drawn or scheduled by time follows it."""
        self.version = 0
        """The number of the present weights. Never used twice, so it can jump where a run goes on."""
        self._plan = export_plan(config, self._spec)
        self._publisher: Publisher | None = None

    # ---- one training step

    def train(self, batch: TrainBatch) -> StepResult | None:
        """Train on ``batch`` and move to the next step and version.

        Gives the result on the reporting rank, None elsewhere.

        Raises StalenessViolation when a token that carries loss is outside the bound: the last gate, at the
        place where it matters.
        """
        if batch.version != self.version:
            raise ValueError(
                f"a batch for version {batch.version} reached a trainer at version {self.version}"
            )
        check_staleness(batch, self._config.rollout.max_head_offpolicyness)
        minibatches, packing = self._assemble(batch)
        every_microbatch = [micro for minibatch in minibatches for micro in minibatch]
        recompute = self._config.actor.recompute_logprobs
        temperature = self._config.rollout.sampling.temperature
        proximal: list[Tensor | None] = [None] * len(every_microbatch)
        if recompute:
            proximal = self._log_probs(every_microbatch, temperature)
        statistics = StepStatistics()
        remaining = iter(proximal)
        for minibatch in minibatches:
            self._update(minibatch, list(itertools.islice(remaining, len(minibatch))), statistics)
        self._gather_weights()
        self.step += 1
        self.version += 1
        metrics = statistics.reduced(self._groups.get_data_parallel_group()) if self._is_last_stage else {}
        return StepResult(self.version, metrics | packing) if self._reports else None

    def _assemble(self, batch: TrainBatch) -> tuple[list[list[MicroBatch]], dict[str, float]]:
        """This rank's micro-batches, by mini-batch; and how well all ranks' are packed, as metrics."""
        actor = self._config.actor
        advantage_N, tokens_N = self._advantages(batch)
        length_N = np.array([len(trajectory.tokens_T) for trajectory in batch.trajectories])
        cost_N = forward_flops(self._spec.geometry, length_N)
        plan = schedule(
            length_N,
            cost_N,
            minibatches=actor.minibatches,
            ranks=actor.parallel.data,
            multiple=actor.parallel.microbatch_multiple,
            budget=actor.microbatch_tokens,
            rng=np.random.default_rng((self._config.run.seed, self.step)),
        )
        rank = self._groups.get_data_parallel_rank()
        # A mean is over the mini-batch on all ranks, not over what is on one of them.
        share_N = np.zeros(len(tokens_N), np.float32)
        for minibatch in plan:
            everywhere = [index for packs in minibatch for pack in packs for index in pack]
            share_N[everywhere] = token_shares(
                actor.averaging, tokens_N[everywhere], batch.group_N[everywhere]
            )
        microbatches = [
            [
                assemble(batch, advantage_N, pack, self._multiple, each=self._each, share_N=share_N)
                for pack in minibatch[rank]
            ]
            for minibatch in plan
        ]
        found = balance(plan, length_N, cost_N, actor.microbatch_tokens)
        return microbatches, {"packing/fill": found.fill, "packing/imbalance": found.imbalance}

    def _advantages(self, batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
        """Advantages, float32 [N], and numbers of tokens that carry loss [N]."""
        actor = self._config.actor
        reward_N = torch.tensor([trajectory.reward for trajectory in batch.trajectories])
        if actor.overlong is not None:
            length_N = torch.tensor([trajectory.sampled_length for trajectory in batch.trajectories])
            reward_N = reward_N - overlong_penalty(length_N, **actor.overlong.model_dump())
        tokens_N = np.array([trajectory.response_length for trajectory in batch.trajectories])
        advantage_N = ADVANTAGES[actor.advantage](
            reward_N, torch.from_numpy(batch.group_N), torch.from_numpy(tokens_N)
        )
        return advantage_N.numpy(), tokens_N

    def _update(
        self, minibatch: list[MicroBatch], proximal: list[Tensor | None], statistics: StepStatistics
    ) -> None:
        """One optimizer update."""
        for part in self._parts:
            part.zero_grad_buffer()
        self._optimizer.zero_grad()
        lr = self._learning_rate(self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        loss = {
            id(micro): partial(self._loss, micro, old) for micro, old in zip(minibatch, proximal, strict=True)
        }
        results = self._pipeline(minibatch, lambda micro: loss[id(micro)], forward_only=False)
        succeeded, grad_norm, _ = self._optimizer.step()
        statistics.add_update(
            results,
            grad_norm=float("nan") if grad_norm is None else float(grad_norm),
            lr=lr,
            succeeded=bool(succeeded),
        )

    def _log_probs(self, microbatches: list[MicroBatch], temperature: float) -> list[Tensor | None]:
        """Log-probs [M] of every micro-batch under the present weights; None except on the last stage."""
        for part in self._parts:
            part.eval()
        with torch.no_grad():
            found = self._pipeline(
                microbatches,
                lambda micro: partial(self._log_probs_of, micro, temperature),
                forward_only=True,
            )
        for part in self._parts:
            part.train()
        return found if self._is_last_stage else [None] * len(microbatches)

    def logprobs(self, ids: Sequence[int]) -> list[float] | None:
        """Log-probs of ids[1:] given what precedes them, at temperature 1, under the present weights.

        The result on the reporting rank, None elsewhere.
        """
        n = len(ids) - 1
        text = TrajectoryBuilder(ids[:1])
        text.add_completion(
            Completion(tuple(ids[1:]), (0.0,) * n, (Span(self.version, 0, n),), Finish.LENGTH)
        )
        batch = TrainBatch(self.version, (text.build(),), np.zeros(1, np.int64))
        micro = assemble(batch, np.zeros(1), [0], self._multiple, each=self._each)
        times = self._config.actor.parallel.microbatch_multiple
        found = self._log_probs([micro] * times, temperature=1.0)
        return found[0].tolist() if self._reports else None

    def _pipeline(self, microbatches: list[MicroBatch], head: Any, *, forward_only: bool) -> list[Any]:
        """Run micro-batches through Megatron's pipeline schedule; what ``head`` gave on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
            micro = next(iterator)
            return self._forward(micro, model), head(micro)

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(microbatches) for _ in self._parts],
            model=self._parts,
            num_microbatches=len(microbatches),
            seq_length=max(len(micro.tokens_T) for micro in microbatches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _forward(self, micro: MicroBatch, model: torch.nn.Module) -> Tensor:
        """Hidden states; those of the last stage are what the head takes."""
        from megatron.core.packed_seq_params import PackedSeqParams

        cu_seqlens = self._tensor(micro.cu_seqlens)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=micro.longest,
            max_seqlen_kv=micro.longest,
        )
        if self._config.actor.parallel.context > 1:
            packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = cu_seqlens
        share = self._share(micro)
        return model(
            input_ids=self._tensor(share.tokens_t)[None],
            position_ids=self._tensor(share.position_t)[None],
            attention_mask=None,
            packed_seq_params=packed,
        )

    def _log_probs_of(
        self, micro: MicroBatch, temperature: float, hidden: Tensor, non_loss_data: bool = True
    ) -> Tensor:
        return self._logprob_and_entropy(micro, temperature, hidden)[0]

    def _logprob_and_entropy(
        self, micro: MicroBatch, temperature: float, hidden_1TH: Tensor, *, differentiable: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [M]; the entropies have a gradient only when ``differentiable``."""
        from backend.megatron import context, head

        share = self._share(micro)
        found = head.logprob_and_entropy(
            self._parts[-1].module,
            hidden_1TH,
            self._tensor(share.index_m),
            self._tensor(share.target_m),
            temperature=temperature,
            vocab=self._spec.geometry.vocab,
            float32_logits=self._config.actor.fp32_lm_head,
            entropy_gradient=differentiable,
        )
        if self._config.actor.parallel.context == 1:
            return found
        order_M, group = self._tensor(share.order_M), self._groups.get_context_parallel_group()
        logp_M, entropy_M = (context.gathered(own_m, share.counts, order_M, group) for own_m in found)
        return logp_M, entropy_M

    def _share(self, micro: MicroBatch) -> ContextShare:
        return share_of(micro, self._config.actor.parallel.context, self._groups.get_context_parallel_rank())

    def _loss(
        self, micro: MicroBatch, proximal_M: Tensor | None, logits: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """Sum of token losses, token count, statistics: what Megatron's per-token loss asks for."""
        actor = self._config.actor
        logp_M, entropy_M = self._logprob_and_entropy(
            micro, self._config.rollout.sampling.temperature, logits, differentiable=actor.entropy_bonus > 0
        )
        behaviour_M, lag_M = self._tensor(micro.behaviour_logp_M), self._tensor(micro.lag_M)
        if actor.interpolate_logprobs:
            proximal_M = interpolated_logp(logp_M, behaviour_M, lag_M)
        tokens = Tokens(
            logp_M=logp_M,
            behaviour_logp_M=behaviour_M,
            proximal_logp_M=proximal_M,
            advantage_M=self._tensor(micro.advantage_M),
            lag_M=lag_M,
            owner_M=self._tensor(micro.owner_M),
            owners=micro.owners,
        )
        loss = token_losses(actor, tokens)
        share_M = self._tensor(micro.share_M)
        total = (share_M * loss.loss_T).sum()
        if actor.entropy_bonus > 0:
            total = total - actor.entropy_bonus * (share_M * entropy_M).sum()
        measured = token_statistics(
            loss=loss,
            tokens=tokens,
            share_M=share_M,
            entropy_M=entropy_M.detach(),
            recomputed=actor.recompute_logprobs,
            weight_cap=actor.correction.weight_cap if actor.use_decoupled_loss else None,
        )
        count = torch.tensor(len(self._share(micro).index_m), dtype=torch.int, device=self._device)
        return total, count, measured

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    @property
    def _multiple(self) -> int:
        """The length of a micro-batch is one of it."""
        parallel = self._config.actor.parallel
        return self._each * (parallel.tensor if parallel.sequence else 1)

    @property
    def _each(self) -> int:
        """The length of a trajectory in it, with padding, is one of it."""
        context = self._config.actor.parallel.context
        return 2 * context if context > 1 else 1

    @property
    def _is_last_stage(self) -> bool:
        return self._groups.is_pipeline_last_stage()

    @property
    def _reports(self) -> bool:
        first_of_tensor = self._groups.get_tensor_model_parallel_rank() == 0
        first_of_data = self._groups.get_data_parallel_rank(with_context_parallel=True) == 0
        return self._is_last_stage and first_of_tensor and first_of_data

    # ---- checkpoints

    def begin_checkpoint(self, folder: str) -> None:
        """Take a snapshot and start to write it into ``folder``, which all ranks see, in the background."""
        self._checkpoints.begin(Path(folder), step=self.step, version=self.version)

    def checkpoint_done(self) -> bool:
        """Has this rank's writing ended, well or not. Does not wait, and needs no other rank."""
        return self._checkpoints.written

    def finish_checkpoint(self) -> None:
        """Wait for the writing and make the checkpoint readable.

        Raises CheckpointError on every rank when it has failed on any; training can go on all the same.
        """
        self._checkpoints.finish()

    def restore(self, folder: str, version: int) -> int:
        """Take over the state of a checkpoint, as version ``version``; the training steps it had done."""
        self.step = self._checkpoints.load(Path(folder))
        self.version = version
        return self.step

    # ---- the weights' way out

    def publish(self, engines: Sequence[EngineAddress]) -> PublishReport | None:
        """Bring ``engines`` to this trainer's version. The report on the sender, None elsewhere."""
        buckets = self._export()
        if dist.get_rank() != SENDER:
            for _ in buckets:
                """Sends its parts."""
            return None
        if self._publisher is None:
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            self._publisher = make_publisher(self._config, self._plan, address=self._address, backend=backend)
        return asyncio.run(_publish(self._publisher, self.version, engines, buckets))

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
