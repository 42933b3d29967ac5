"""One rank of the trainer: a training step, and the publication of its weights.

TrainBatch        the trajectories of one step
    |             changed by the recipe's transforms                              plugins
    |             packed into micro-batches, this rank's of every mini-batch      minibatches
    |             forward passes: proximal log-probs (not of the first
    |             mini-batch, whose update gives them), reference and teacher
    |             log-probs, the critic's values                                  scoring
Scores
    |             rewards, penalties and scores become advantages and returns     targets
Targets
    |             one optimizer update of the policy per mini-batch, by the
    |             decoupled loss                       policy_update, objective.losses
    |             one optimizer update of the critic per mini-batch               critic
    |             updates that are not finite: left out on all ranks, and named   skipping
    |             the average reference takes in the new policy                   scoring
metrics
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from slipstream.backend.batch.micro_batch import MicroBatch, assemble
from slipstream.backend.batch.skipped import SkippedUpdate
from slipstream.backend.batch.train_batch import EncodedBatch, TrainBatch, check_staleness, unrouted
from slipstream.backend.megatron.export_plan import export_plan
from slipstream.backend.megatron.finite import require_finite
from slipstream.backend.megatron.parallel import RankSpec, initialize
from slipstream.backend.trainer.checkpointed_rank import CheckpointedRank
from slipstream.backend.trainer.episode_log import StepLogProbs, open_episode_log
from slipstream.backend.trainer.hooks import rank_hooks
from slipstream.backend.trainer.learning_rate import learning_rate
from slipstream.backend.trainer.minibatches import first_recomputed, is_recomputed, microbatches_of
from slipstream.backend.trainer.plugins import RankPlugins
from slipstream.backend.trainer.policy_update import update_policy
from slipstream.backend.trainer.prepared import PreparedMicroBatch, Scores, Targets, prepared
from slipstream.backend.trainer.publishing import RankPublisher, RankWeights, rank_publisher
from slipstream.backend.trainer.rehearsal import largest_microbatches, rehearse_policy
from slipstream.backend.trainer.skipping import SkippedUpdates
from slipstream.backend.trainer.targets import find_targets
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.files import write_hf
from slipstream.bridge.hf.peft_config import peft_folder
from slipstream.bridge.publish.report import PublishReport
from slipstream.bridge.shards.export import export
from slipstream.bridge.shards.plan import SENDER
from slipstream.configs.schema import RunConfig, TransportConfig
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.system import plugins
from slipstream.rollout.tokens.trajectory import Completion, Finish, Span, TrajectoryBuilder


class TrainerRank(CheckpointedRank):
    """One rank of the trainer. All ranks are called with the same arguments, in the same order."""

    def __init__(self, config: RunConfig, rank: RankSpec) -> None:
        self._config = config
        self._address = rank.address
        self._device = initialize(
            rank,
            config.actor.parallel,
            seed=config.run.seed,
            timeout_s=config.run.step_timeout_s,
            gpu_share=1 - (config.rollout.engine.gpu_share or 0),
        )
        self._plugins = RankPlugins(config.actor, config.rollout.max_head_offpolicyness)
        self._hooks = rank_hooks(config, self._device)
        # Megatron can only be imported now.
        from slipstream.backend.megatron import checkpoint, fusions, groups, head, model
        from slipstream.backend.megatron.node_checkpoint import node_checkpoints
        from slipstream.backend.megatron.packed_model import LanguageModel
        from slipstream.backend.megatron.resting import Resting
        from slipstream.backend.megatron.trained import Trained
        from slipstream.backend.trainer.scoring import Scorers

        self._groups = groups.groups
        self._reports = groups.reports()
        self._skipped = SkippedUpdates(self._reports)
        self._require_finite = partial(require_finite, device=self._device)
        self._spec = model_spec(config.model.path, plugins.resolved(config.model.families))
        dtype = getattr(torch, config.model.dtype)
        actor = config.actor
        parts = model.build_model(
            self._spec,
            actor,
            dtype,
            self._device,
            seed=config.run.seed,
            provider=self._hooks.provider,
        )
        head.pass_on_hidden_states(parts)
        self._trained = Trained(parts, actor, dtype)
        self._policy = LanguageModel(
            self._trained.parts,
            self._device,
            vocab=self._spec.geometry.vocab,
            float32_logits=actor.fp32_lm_head,
            implementation=fusions.head_implementation(actor, fusions.KernelSupport.present()),
            replay=actor.routing_replay,
        )
        self._parameters = [model.named_shards(part) for part in parts]
        self._adapter = None if actor.lora is None else model.adapter_export(parts, self._spec, actor)
        self._learning_rate = partial(learning_rate, actor.optimizer, run_steps=config.run.total_steps)
        self._scorers = Scorers(
            actor,
            config.critic,
            config.model,
            self._device,
            config.run.total_steps,
            self._hooks.log_probs_begin,
        )
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
            nodes=node_checkpoints(config),
        )
        self._resting = Resting(self._device)
        self._plan = export_plan(actor, config.model.dtype, config.weights.transport, self._spec)
        self._publisher: RankPublisher | None = None
        self._publisher_settings = config.weights
        self._episodes = None
        if groups.holds_results():
            self._episodes = open_episode_log(
                config.log.episodes,
                config.run.folder,
                config.model.path,
                writer=self._groups.get_data_parallel_rank(),
                writers=config.actor.parallel.data,
            )

    # ---- one training step

    def train_encoded(self, batch: EncodedBatch) -> dict[str, float] | None:
        """Train one step, as ``train`` does, and log its episodes. Raises CorruptRecord as well."""
        return self._train(batch.decoded(), None if self._episodes is None else StepLogProbs())

    def train(self, batch: TrainBatch) -> dict[str, float] | None:
        """Train one step on ``batch``. Return its metrics on the reporting rank, None elsewhere.

        Raises StalenessViolation if a token that carries loss is outside the bound: the last check before it
        would be trained on.
        """
        return self._train(batch, None)

    def _train(self, batch: TrainBatch, logprobs: StepLogProbs | None) -> dict[str, float] | None:
        """Train one step. ``logprobs``: of the step, for the episode log; None: the step is not logged."""
        check_staleness(batch, self._config.rollout.max_head_offpolicyness)
        batch = self._plugins.transformed(batch)
        self._skipped.begin(batch)
        routed = self._routes_of(batch)
        minibatches, metrics = self.microbatches(batch)
        metrics |= routed
        microbatches = list(chain.from_iterable(minibatches))
        self._hooks.step_begins(self.step, batch, microbatches)
        config = self._config
        first = first_recomputed(config.actor, config.rollout.hooks)
        temperature = config.rollout.sampling.temperature
        scores = self._scorers.score(self._policy, minibatches, first, temperature)
        targets = self._hooks.targets(scores, self._targets(batch, microbatches, scores))
        inputs = prepared(minibatches, scores, targets)
        metrics["train/tokens"] = float(sum(each.response_length for each in batch.trajectories))
        metrics |= self._update_policy(batch, inputs, logprobs)
        metrics |= self._update_critic(inputs)
        self._scorers.follow(self._parameters)
        self.step += 1
        if self._episodes is not None and logprobs is not None:
            self._episodes.step_ends(self.step, batch, inputs, logprobs)
        return metrics | self._plugins.measured(batch, metrics) if self._reports else None

    def skipped_updates(self) -> list[SkippedUpdate] | None:
        """Return the updates that the last step has skipped, on the reporting rank, None elsewhere."""
        return self._skipped.reported()

    def microbatches(self, batch: TrainBatch) -> tuple[list[list[MicroBatch]], dict[str, float]]:
        """Return this rank's micro-batches in its present step, as ``microbatches_of`` does."""
        rank = self._groups.get_data_parallel_rank()
        actor, seed = self._config.actor, self._config.run.seed
        # A backward pass counts as two forward passes.
        passes_N = 3 + is_recomputed(actor, self._config.rollout.hooks, batch.episode_N, seed, self.step)
        geometry = self._spec.geometry
        return microbatches_of(actor, geometry, batch, seed, self.step, rank=rank, passes_N=passes_N)

    def _targets(
        self, batch: TrainBatch, microbatches: Sequence[MicroBatch], scores: Sequence[Scores]
    ) -> Sequence[Targets | None]:
        if not self._groups.is_pipeline_last_stage():
            return [None] * len(microbatches)
        group = self._groups.get_data_parallel_group()
        actor, critic = self._config.actor, self._config.critic
        targets = find_targets(actor, critic, batch, microbatches, scores, group, self._plugins, self._device)
        # Before the first micro-batch: a copy in the middle of one makes the host wait.
        columns = [(target.advantage_M, *target.measured.values()) for target in targets]
        moved = iter(self._policy.moved_together(list(chain.from_iterable(columns))))
        return [
            replace(
                target,
                advantage_M=next(moved),
                measured={name: next(moved) for name in target.measured},
            )
            for target in targets
        ]

    def _routes_of(self, batch: TrainBatch) -> dict[str, float]:
        """Return how much of the engine's routes is missing, where they are replayed."""
        experts = self._spec.geometry.experts
        if self._config.actor.routing_replay != "rollout" or experts is None:
            return {}
        layers = [n not in experts.dense_layers for n in range(self._spec.geometry.n_layers)]
        return {"mismatch/unrouted": unrouted(batch, layers, experts.per_token, experts.count)}

    def _update_policy(
        self,
        batch: TrainBatch,
        inputs: Sequence[Sequence[PreparedMicroBatch]],
        logprobs: StepLogProbs | None,
    ) -> dict[str, float]:
        """Update the policy, unless only the critic is trained yet. Return metrics on the last stage."""
        critic = self._config.critic
        if critic is not None and self.step < critic.warmup_steps:
            return {}
        statistics = update_policy(
            self._trained,
            self._policy,
            inputs,
            self._config.actor,
            self._skipped,
            temperature=self._config.rollout.sampling.temperature,
            lr=batch.rate_factor * self._learning_rate(self.step),
            plugins=self._plugins,
            hooks=self._hooks,
            mismatch=batch.mismatch,
            logprobs=logprobs,
        )
        if not self._groups.is_pipeline_last_stage():
            return {}
        return statistics.reduced(self._groups.get_data_parallel_group())

    def _update_critic(self, inputs: Sequence[Sequence[PreparedMicroBatch]]) -> dict[str, float]:
        """Update the critic, if there is one. Return metrics on the last stage."""
        critic = self._scorers.critic
        if critic is None:
            return {}
        statistics = critic.update(inputs, self.step, self._skipped)
        if not self._groups.is_pipeline_last_stage():
            return {}
        return statistics.reduced(self._groups.get_data_parallel_group())

    def logprobs(self, ids: Sequence[int]) -> list[float] | None:
        """Return the log-prob of each of ids[1:] after the ids before it, at temperature 1 under the present
        weights. The result is on the reporting rank, None elsewhere.
        """
        n = len(ids) - 1
        text = TrajectoryBuilder(ids[:1])
        text.add_completion(Completion(tuple(ids[1:]), (0.0,) * n, (Span(0, 0, n),), Finish.LENGTH))
        batch = TrainBatch(0, (text.build(),), np.zeros(1, np.int64))
        parallel = self._config.actor.parallel
        micro = assemble(
            batch, [0], parallel.length_multiple, trajectory_multiple=parallel.trajectory_multiple
        )
        logp_M, *_ = self._policy.log_probs([micro] * parallel.microbatch_multiple, temperature=1.0)
        return logp_M.tolist() if logp_M is not None and self._reports else None

    # ---- taking turns with the engines

    def show_peak(self) -> tuple[int, int] | None:
        """Take the memory of the largest step. Return the bytes of the GPU that are free then, and all.

        Weights, optimizer state and random numbers stay as they are. Does nothing on a CPU.
        """
        if self._device.type != "cuda":
            return None
        self.rehearse()
        return torch.cuda.mem_get_info()

    def rehearse(self) -> None:
        """Run every model that trains over the largest micro-batch, and drop the gradients."""
        config, geometry = self._config, self._spec.geometry
        new_tokens = config.rollout.sampling.max_new_tokens
        microbatches = largest_microbatches(
            config.actor, new_tokens, positions=geometry.max_positions, vocab=geometry.vocab
        )
        entropy = config.actor.entropy_bonus > 0
        rehearse_policy(self._trained, self._policy, microbatches, entropy=entropy)
        if self._scorers.critic is not None:
            self._scorers.critic.rehearse(microbatches)

    def rest(self, keep_weights: bool) -> None:
        """Give up the device's memory, except for the weights if ``keep_weights``: they can be published.

        Nothing else may be asked of the rank until ``wake``.
        """
        self._trained.rest(self._resting, keep_weights=keep_weights)
        if self._scorers.critic is not None:
            self._scorers.critic.trained.rest(self._resting)

    def wake(self) -> None:
        """Move the rank's state back to the device."""
        self._resting.wake()

    # ---- publication of the weights

    def publish(
        self, version: int, engines: Sequence[EngineAddress], transport: TransportConfig | None = None
    ) -> PublishReport | None:
        """Send the weights to ``engines`` as ``version``. Return the report on the sender, None elsewhere.

        ``transport``: None for the recipe's. Raises NotFinite on every rank, before anything is sent, unless
        all weights are finite.
        """
        served = self._adapter if self._config.actor.serves_adapter else None
        parameters = self._parameters if served is None else served.parameters
        self._require_finite("the weights of the policy", parameters)
        settings = self._config.weights
        if transport is not None and transport != settings.transport:
            settings = settings.model_copy(update={"transport": transport})
        if self._publisher is not None and self._publisher_settings != settings:
            self._publisher.close()
            self._publisher = None
        if self._publisher is None:
            weights = RankWeights(self._plan, self._parameters, served, self._address, self._device)
            config = self._config
            self._publisher_settings = settings
            self._publisher = rank_publisher(
                settings,
                config.rollout.engine,
                config.model,
                config.run.folder,
                weights,
                self._hooks.version_written,
            )
        if dist.get_rank() == SENDER:
            self._hooks.publication_begins(engines)
        return self._publisher.publish(version, engines)

    def export_hf(self, folder: Path) -> None:
        """Write the present weights as an HF checkpoint directory. Raises NotFinite as ``publish`` does.

        An adapter is merged into the weights, and is in a folder of its own beside them.
        """
        self._require_finite("the weights of the policy", self._parameters)
        buckets = export(self._plan, self._parameters, dist.get_rank())
        write_hf(buckets, self._spec.path, folder, kept=self._spec.kept)
        if self._adapter is not None:
            self._adapter.write(peft_folder(folder))
        self.flush()  # nothing is trained after the export

    def flush(self) -> None:
        """Write the rows of the episode log that wait."""
        if self._episodes is not None:
            self._episodes.flush()
