"""From a recipe, its inputs and its state to the parts of a run. Each is made of finished parts.

listener ──► gate ──► pool ──► trainer, devices ──► weights ──► supervisor, checkpoints ──► collector
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from slipstream.backend.checkpoint.folder import CHECKPOINTS, CheckpointFolder
from slipstream.backend.cluster.actors import EngineActors, create_ranks
from slipstream.backend.cluster.placement import Placement
from slipstream.backend.cluster.rank_group import RankGroup
from slipstream.backend.driver.checkpointing import TrainerCheckpoints
from slipstream.backend.driver.devices import Colocated, Devices, Separate
from slipstream.backend.driver.engines import EngineLimits, RayEngine
from slipstream.backend.driver.evaluation import Evaluation
from slipstream.backend.driver.inputs import Inputs
from slipstream.backend.driver.ports import RunListener
from slipstream.backend.driver.resume import RunState
from slipstream.backend.driver.served_weights import ServedWeights
from slipstream.backend.driver.trainer import RankedTrainer
from slipstream.backend.driver.verification import Verifier, probe_text
from slipstream.backend.monitor.status import RunStatus
from slipstream.backend.monitor.trace import TraceLog
from slipstream.bridge.publish.endpoint import PAUSE
from slipstream.configs.schema import RunConfig
from slipstream.rollout.collect.episodes import Episodes
from slipstream.rollout.collect.gate import AdmissionGate
from slipstream.rollout.collect.groups import GroupCollector, NamedFilter
from slipstream.rollout.collect.running import RunningGroups
from slipstream.rollout.collect.time_limit import TimeLimit
from slipstream.rollout.control.concurrency import ConcurrencyController
from slipstream.rollout.engine.client import EngineClient
from slipstream.rollout.engine.pool import EnginePool
from slipstream.rollout.engine.supervisor import Supervisor
from slipstream.rollout.engine.trace import RequestTrace
from slipstream.rollout.workflow import WorkflowContext


@dataclass(frozen=True)
class Parts:
    """The parts that the course of a run drives."""

    gate: AdmissionGate
    pool: EnginePool
    trainer: RankedTrainer
    weights: ServedWeights[EngineClient]
    supervisor: Supervisor
    controller: ConcurrencyController | None
    collector: GroupCollector
    running: RunningGroups
    evaluation: Evaluation | None
    checkpoints: TrainerCheckpoints

    def status(self) -> RunStatus:
        """Return where the run stands now."""
        return RunStatus(
            version=self.gate.version,
            step=self.gate.step,
            counts=self.gate.counts,
            losses=self.gate.losses,
            states=self.gate.states,
            tokens_generated=self.pool.tokens_generated,
            requests_running=self.pool.in_use,
            requests_limit=self.pool.limit,
            requests_resent=self.pool.requests_resent,
            engine_restarts=self.supervisor.restarts,
        )


def assemble(
    config: RunConfig,
    inputs: Inputs,
    state: RunState,
    placement: Placement,
    logs: Path,
    listener: RunListener,
    trace: TraceLog,
) -> Parts:
    """Make every part. The trainer's actors exist afterwards; nothing else is started."""
    rollout = config.rollout
    running = RunningGroups()
    gate = AdmissionGate(state.control, state.intake, state.ledger, listener, running)

    def trace_request(request: RequestTrace) -> None:
        trace.write("request", **asdict(request))

    pool = EnginePool(
        state.control,
        max_concurrent=rollout.max_concurrent,
        wait_timeout_s=rollout.engine.start_timeout_s,
        isolate_versions=config.weights.interrupt == "in_place",
        trace=trace_request,
    )
    ranks = RankGroup(create_ranks(config, placement, logs), timeout_s=config.run.step_timeout_s, logs=logs)
    trainer = RankedTrainer(ranks, step_timeout_s=config.run.step_timeout_s)
    limit = TimeLimit(rollout.episode_timeout_s)
    devices = _devices(config, trainer, pool, limit)
    weights = ServedWeights(trainer, pool, devices, gate, verifier=_verifier(config, inputs))
    actors = EngineActors(config, placement, logs)
    limits = EngineLimits.of(config, inputs.spec.geometry)
    supervisor = Supervisor(
        [RayEngine(number, actors, limits, trainer, devices) for number in range(rollout.engine.count)],
        pool,
        weights,
        restarts=rollout.engine.restarts,
        note=listener.note,
    )
    checkpoints = TrainerCheckpoints(
        config.checkpoint,
        CheckpointFolder(
            config.run.folder / CHECKPOINTS,
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
        ),
        trainer,
        weights.trainers_turn,
        state.ledger,
        listener,
        last_step=state.control.step,
    )
    context = WorkflowContext(pool, inputs.tokenizer, inputs.reward, rollout.sampling)
    episodes = Episodes(inputs.workflow, rollout, limit, listener)
    collector = GroupCollector(
        gate=gate,
        journal=state.ledger,
        engines=pool,
        context=context,
        episodes=episodes,
        samples=rollout.n_samples_per_prompt,
        group_filter=_filter(config, inputs),
    )
    evaluation = None
    if config.eval is not None and inputs.held_out:
        evaluation = Evaluation(config.eval, inputs.held_out, pool, context, episodes, listener)
    adapts = rollout.engine.adaptive_concurrency
    return Parts(
        gate=gate,
        pool=pool,
        trainer=trainer,
        weights=weights,
        supervisor=supervisor,
        controller=ConcurrencyController(maximum=rollout.max_concurrent) if adapts else None,
        collector=collector,
        running=running,
        evaluation=evaluation,
        checkpoints=checkpoints,
    )


def _devices(config: RunConfig, trainer: RankedTrainer, pool: EnginePool, episodes: TimeLimit) -> Devices:
    interrupt = config.weights.interrupt
    drain_s = config.weights.timeout_s if interrupt == "drain" else None
    if not config.rollout.engine.colocated:
        return Separate(partial(pool.drained, drain_s)) if drain_s is not None else Separate()
    return Colocated(
        trainer,
        pool,
        pause=PAUSE[interrupt],
        drain_s=drain_s,
        timeout_s=config.weights.timeout_s,
        episodes=episodes,
    )


def _verifier(config: RunConfig, inputs: Inputs) -> Verifier | None:
    verify = config.weights.verify
    if verify.type == "off":
        return None
    length = min(verify.tokens, inputs.spec.geometry.max_positions - 1)
    return Verifier(
        verify,
        probe_text(inputs.prompts, inputs.tokenizer, length),
        config.model.dtype,
        answer_timeout_s=config.weights.answer_timeout_s,
        timeout_s=config.weights.timeout_s,
    )


def _filter(config: RunConfig, inputs: Inputs) -> NamedFilter | None:
    if config.rollout.group_filter is None or inputs.group_filter is None:
        return None
    return NamedFilter(config.rollout.group_filter.path, inputs.group_filter)
