"""From a recipe, its inputs and its state to the parts of a run. Each is made of finished parts.

listener ──► gate, batches ──► roster ──► trainer, devices ──► weights ──► supervisor, checkpoints ──► revival
              └─────────────────┴───► assignments, questions ──► server, collectors                      ▲
                                        └────────────────────────────────────────────────────────────────┘
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slipstream.backend.checkpoint.folder import CHECKPOINTS, CheckpointFolder
from slipstream.backend.cluster.actors import CollectorActors, EngineActors, create_ranks
from slipstream.backend.cluster.engine_spec import adapters_of
from slipstream.backend.cluster.placement import Placement
from slipstream.backend.cluster.rank_group import RankGroup
from slipstream.backend.driver.loops.evaluation import Evaluation
from slipstream.backend.driver.loops.hooked_batches import BESIDE_DRIVER, HookedBatches
from slipstream.backend.driver.loops.live_users import LiveUsers
from slipstream.backend.driver.ports import RunListener, RunTrainer
from slipstream.backend.driver.processes.collectors import Collectors
from slipstream.backend.driver.processes.devices import Beside, Colocated, Devices, Separate
from slipstream.backend.driver.processes.engines import EngineLimits, policy_engines
from slipstream.backend.driver.processes.gateways import Gateways, gateway_command
from slipstream.backend.driver.processes.joined_engines import JoinedEngines, barred, facts_of
from slipstream.backend.driver.processes.judge_engines import judge_supervisor
from slipstream.backend.driver.processes.places import EnginePlaces
from slipstream.backend.driver.processes.restart_limits import (
    collector_limit,
    engine_limit,
    gateway_limit,
    trainer_limit,
)
from slipstream.backend.driver.start.inputs import Inputs
from slipstream.backend.driver.start.resume import RestoredCollection, RunState, restore_collection
from slipstream.backend.driver.weights.checkpointing import TrainerCheckpoints
from slipstream.backend.driver.weights.interrupted import InterruptedUpdates
from slipstream.backend.driver.weights.ranked_trainer import RankedTrainer
from slipstream.backend.driver.weights.revival import Revival
from slipstream.backend.driver.weights.rewind import Rewind
from slipstream.backend.driver.weights.served_weights import ServedWeights
from slipstream.backend.driver.weights.transports import PlannedSeconds, Transports, unplanned
from slipstream.backend.driver.weights.verification import Verifier, probe_text
from slipstream.backend.monitor.status import RunStatus
from slipstream.bridge.publish.endpoint import PAUSE
from slipstream.configs.schema import LiveConfig, RunConfig
from slipstream.configs.schema.judge import asks_policy, own_engines
from slipstream.rollout.collection.driver.assignments import Assignments
from slipstream.rollout.collection.driver.batches import Batches
from slipstream.rollout.collection.driver.gate import AdmissionGate
from slipstream.rollout.collection.driver.lost_groups import LostGroups
from slipstream.rollout.collection.driver.questions import EvaluationTasks
from slipstream.rollout.collection.driver.server import CollectorServer
from slipstream.rollout.compat.hooks import hook_drawing
from slipstream.rollout.control.concurrency import ConcurrencyController
from slipstream.rollout.engine.adapters import POLICY
from slipstream.rollout.engine.asked_engines import encoded
from slipstream.rollout.engine.client import EngineClient
from slipstream.rollout.engine.roster import FOLLOW_TIMEOUT_S, EngineRoster
from slipstream.rollout.engine.supervisor import EngineCounts, Supervisor, unwell
from slipstream.rollout.ledger.recovery import Recovered
from slipstream.rollout.live.baseline import ScoreBaseline
from slipstream.rollout.live.judging import LiveJudging
from slipstream.rollout.live.live_turns import LiveTurns
from slipstream.rollout.live.receiver import GatewayReceiver
from slipstream.rollout.prompts.sources.drawn_prompts import Drawing
from slipstream.rollout.prompts.sources.source_process import own_drawing
from slipstream.rollout.reward.judge.judge_pool import JudgePool
from slipstream.rollout.reward.judge.named_model import judge_of_turns, named_model
from slipstream.rollout.system.frames import SILENCE_S
from slipstream.rollout.system.key import Key, new_key
from slipstream.rollout.system.restarts import Restarts
from slipstream.rollout.tokens.teacher import TeacherNeeds
from slipstream.rollout.tokens.trajectory import Prompt

PROBE = "What do you see when you look out of the window?"
"""The prompt with which weights are verified in a run without prompts."""


@dataclass(frozen=True)
class Parts:
    """The parts that the course of a run drives."""

    gate: AdmissionGate
    batches: Batches
    roster: EngineRoster
    trainer: RunTrainer
    weights: ServedWeights[EngineClient]
    supervisor: Supervisor
    joined: JoinedEngines
    """Engines from outside."""
    controller: ConcurrencyController | None
    assignments: Assignments
    server: CollectorServer
    collectors: Collectors
    evaluation: Evaluation | None
    checkpoints: TrainerCheckpoints
    revival: Revival[EngineClient]
    turns: LiveTurns | None
    """Turns of live users; None without a gateway."""
    live: LiveUsers | None
    """None without a gateway."""
    judge: Supervisor | None
    """Keeps the judge's own engines serving; None: it has none."""
    hooks: HookedBatches | None
    """Hooks that see whole batches; None where the recipe names none."""
    lost: LostGroups | None
    """Has groups that are never trained written into the episode log; None: the recipe asks for none."""
    drawing: Drawing | None
    """Gets the prompts of a data source; None where the recipe names none."""

    def status(self) -> RunStatus:
        """Return where the run stands now."""
        core = self.gate.core
        return RunStatus(
            version=core.version,
            step=core.step,
            counts=core.counts,
            losses=core.losses,
            states=dict(core.states),
            tokens_generated=self.roster.tokens_generated,
            requests_running=self.roster.in_use,
            requests_limit=self.roster.limit,
            requests_resent=self.roster.requests_resent,
            engine_restarts=self.supervisor.restarts,
            collector_restarts=self.collectors.restarts,
            trainer_restarts=self.revival.restarts,
            live=None if self.turns is None else self.turns.status(),
            live_requests_running=self.roster.live_in_use,
            engines_serving=len(self.roster.clients),
            transports_given_up=self.weights.transports_given_up,
        )


def assemble(
    config: RunConfig,
    inputs: Inputs,
    state: RunState,
    placement: Placement,
    logs: Path,
    listener: RunListener,
    *,
    trains: bool = True,
    planned_s: PlannedSeconds = unplanned,
) -> Parts:
    """Make every part. The trainer's actors exist afterwards; nothing else is started.

    Without ``trains``, batches are saved in the run folder, and there is no trainer. ``planned_s``: of a
    publication.
    """
    key, ledger, note = new_key(), state.ledger, listener.note
    turns = live_turns(config, inputs, state, note) if config.gateway is not None else None
    gate = AdmissionGate(state.control, state.intake, ledger, listener, state.groups.ready, turns)
    batches = _batches(config, gate, state, note, turns)
    roster = _roster(config, gate, ledger.epoch)
    places = EnginePlaces(placement)
    trainer = _trainer(config, places, logs) if trains else _batch_saver(config)
    devices = _devices(config, trainer, roster)
    adapters = adapters_of(config, inputs.spec) if trains else None
    engine, adapter = config.rollout.engine, None if adapters is None else POLICY
    limits = EngineLimits.of(engine, inputs.spec.geometry, config.run.step_timeout_s, adapter=adapter)
    verifier = _verifier(config, inputs, limits)
    starts_served = not trains or not _begins_with_adapter(config)
    transports = _transports(config, note, planned_s) if trains else None
    weights = _weights(
        config, trainer, roster, devices, batches, verifier, transports, note, starts_served=starts_served
    )
    actors = EngineActors(config, placement, logs, inputs.engine_model.path, adapters=adapters)
    handles = policy_engines(
        engine,
        actors,
        limits,
        devices,
        placement,
        places,
        trainer_gpus=lambda: trainer.gpus,
        left=lambda: trainer.left,
    )
    counts = EngineCounts(len(placement.engines), engine.fewest_left, engine.most, engine.patience_s)
    watch = partial(unwell, busy_s=config.weights.timeout_s)
    supervisor = Supervisor(
        handles, roster, weights, limit=engine_limit(config), counts=counts, note=note, watch=watch
    )
    expected, folder = partial(facts_of, config, limits), config.run.folder
    checkpoints = _checkpoints(config, state, trainer, weights, listener)
    questions = EvaluationTasks()
    samples = config.rollout.n_samples_per_prompt
    assignments = Assignments(
        gate, ledger, listener, share_of=roster.share_of, samples=samples, resumed=state.groups.continued
    )
    still_to_come = partial(_evaluates_from, config, gate, questions)
    still_to_come()
    logged = config.log.episodes
    lost = None if logged is None else LostGroups(gate, assignments, ledger, logged.share, samples, note)
    hooks = _hooks(config, logs, note)
    restore = partial(_restored, config, inputs, state)
    rewind = Rewind(config.rollout, restore, ledger, gate, batches, assignments, note, turns, still_to_come)
    silence_s = max(SILENCE_S, _patience_s(config))
    server = CollectorServer(key, assignments, questions, roster, ledger, silence_s=silence_s, lost=lost)
    return Parts(
        gate=gate,
        batches=batches,
        roster=roster,
        trainer=trainer,
        weights=weights,
        supervisor=supervisor,
        joined=JoinedEngines(supervisor, roster, limits, expected, folder, note, barred=barred(config)),
        controller=_controller(config),
        assignments=assignments,
        server=server,
        collectors=Collectors(
            collector_limit(config),
            server.has_progressed,
            CollectorActors(placement, config),
            logs,
            key,
            inputs.spec.geometry.vocab,
            limits.max_length,
            note,
        ),
        evaluation=_evaluation(config, inputs, gate, questions, listener, hooks),
        checkpoints=checkpoints,
        revival=Revival(
            trainer,
            weights,
            checkpoints,
            rewind,
            step=lambda: gate.core.step,
            restarts=Restarts(trainer_limit(config)),
            note=note,
            place=partial(places.keep_trainer, supervisor),
        ),
        turns=turns,
        live=None if turns is None else live_users(config, limits, turns, key, roster, logs, listener.note),
        judge=judge_supervisor(config, placement, places, logs, roster.judge_serves, note),
        hooks=hooks,
        lost=lost,
        drawing=_drawing(config, state, gate, logs, note),
    )


def _batches(
    config: RunConfig,
    gate: AdmissionGate,
    state: RunState,
    note: Callable[[str], None],
    turns: LiveTurns | None,
) -> Batches:
    live_wait_s = config.live.max_wait_s if config.live is not None else 0.0
    return Batches(gate, state.ledger, note, state.failures, turns, live_wait_s)


def _restored(
    config: RunConfig, inputs: Inputs, state: RunState, recovered: Recovered, served: int
) -> RestoredCollection:
    """Return the collection restored from ``recovered``, while the engines serve version ``served``."""
    feedback, drawn = state.feedback, state.drawn
    return restore_collection(config, inputs, state.ledger, recovered, feedback, served=served, drawn=drawn)


def _hooks(config: RunConfig, logs: Path, note: Callable[[str], None]) -> HookedBatches | None:
    hooks = config.rollout.hooks
    if hooks is None or not any(setting in hooks.named() for setting in BESIDE_DRIVER):
        return None
    return HookedBatches(hooks, config.model_dump_json().encode(), logs, note)


def _patience_s(config: RunConfig) -> float:
    """Return how long a workflow may hold up its collector, which then ends by itself."""
    return 1.5 * config.rollout.collector_timeout_s


def _roster(config: RunConfig, gate: AdmissionGate, epoch: int) -> EngineRoster:
    follow_timeout_s = max(FOLLOW_TIMEOUT_S, _patience_s(config))
    limit = config.rollout.max_concurrent
    return EngineRoster(
        lambda: gate.core.sampled_version, limit=limit, epoch=epoch, follow_timeout_s=follow_timeout_s
    )


def _controller(config: RunConfig) -> ConcurrencyController | None:
    rollout = config.rollout
    if not rollout.engine.adaptive_concurrency:
        return None
    return ConcurrencyController(maximum=rollout.max_concurrent)


def _weights(
    config: RunConfig,
    trainer: RunTrainer,
    roster: EngineRoster,
    devices: Devices,
    batches: Batches,
    verifier: Verifier | None,
    transports: Transports | None,
    note: Callable[[str], None],
    *,
    starts_served: bool,
) -> ServedWeights[EngineClient]:
    return ServedWeights(
        trainer,
        roster,
        devices,
        batches,
        verifier=verifier,
        interrupted=_interrupted(config, config.weights.timeout_s),
        transports=transports,
        starts_served=starts_served,
        note=note,
    )


def _interrupted(config: RunConfig, timeout_s: float) -> InterruptedUpdates:
    return InterruptedUpdates(resumes=not config.rollout.engine.takes_turns, timeout_s=timeout_s)


def _transports(config: RunConfig, note: Callable[[str], None], planned_s: PlannedSeconds) -> Transports:
    # An engine that hangs in a transfer does not answer: every engine stands still meanwhile.
    updates = _interrupted(config, config.weights.answer_timeout_s)
    return Transports(config, note, updates=updates, planned_s=planned_s)


def _checkpoints(
    config: RunConfig,
    state: RunState,
    trainer: RunTrainer,
    weights: ServedWeights[EngineClient],
    listener: RunListener,
) -> TrainerCheckpoints:
    kept = config.checkpoint
    folder = CheckpointFolder(
        config.run.folder / CHECKPOINTS, keep_last=kept.keep_last, keep_every=kept.keep_every
    )
    return TrainerCheckpoints(
        kept,
        folder,
        trainer,
        weights.trainers_turn,
        state.ledger,
        listener,
        last_step=state.control.step,
        feedback=state.feedback,
        on_nodes=kept.local_dir is not None,
    )


def _evaluation(
    config: RunConfig,
    inputs: Inputs,
    gate: AdmissionGate,
    questions: EvaluationTasks,
    listener: RunListener,
    hooks: HookedBatches | None,
) -> Evaluation | None:
    """Make the evaluation. If it is due before the first step, collectors are told so."""
    if config.eval is None or not inputs.held_out:
        return None
    named = config.rollout.hooks
    evaluation = Evaluation(
        config.eval,
        inputs.held_out,
        questions,
        listener,
        hooks,
        step_of=lambda version: gate.core.versions.updates(version),
        by_function=named is not None and named.evaluating is not None,
    )
    if evaluation.is_due_first(gate.core.step, config.run.folder):
        questions.evaluates_from(0)
    return evaluation


def _evaluates_from(config: RunConfig, gate: AdmissionGate, questions: EvaluationTasks) -> None:
    """Say which evaluations are still to come: those of later steps, and that of the last one."""
    step = gate.core.step
    questions.evaluates_from(step if step >= config.run.total_steps else step + 1)


def _trainer(config: RunConfig, places: EnginePlaces, logs: Path) -> RunTrainer:
    timeout_s = config.run.step_timeout_s
    ranks = RankGroup(lambda: create_ranks(config, places.placement, logs), timeout_s=timeout_s, logs=logs)
    return RankedTrainer(ranks, step_timeout_s=timeout_s)


def _begins_with_adapter(config: RunConfig) -> bool:
    """True if engines need an adapter for version 0, or weights other than those of ``model.path``."""
    lora = config.actor.lora
    return lora is not None and (lora.path is not None or lora.serve == "adapter")


def _batch_saver(config: RunConfig) -> RunTrainer:
    from slipstream.backend.driver.weights.batch_saver import BatchSaver  # imports torch

    return BatchSaver(config.weights, config.log.episodes, config.run.folder, config.model.path)


def _drawing(
    config: RunConfig, state: RunState, gate: AdmissionGate, logs: Path, note: Callable[[str], None]
) -> Drawing | None:
    if state.drawn is None:
        return None
    state.drawn.when_ready(gate.notify)
    if (source := config.rollout.data_source) is not None:
        return own_drawing(
            source, state.drawn, logs, ahead=state.control.capacity, timeout_s=config.run.batch_timeout_s
        )
    drawing = hook_drawing(config, state.drawn, logs, ahead=state.control.capacity, note=note)
    gate.when_lost(drawing.lost)
    return drawing


def live_turns(config: RunConfig, inputs: Inputs, state: RunState, note: Callable[[str], None]) -> LiveTurns:
    """Make the turns of live users, as the ledger has them. Without a section ``live`` none is trained."""
    live = config.live or LiveConfig(train=False)
    reward = config.actor.reward_term
    return LiveTurns(
        state.control,
        state.ledger,
        partial(ScoreBaseline, live.baseline, estimator="grpo" if reward is None else reward.estimator),
        state.turns,
        train=live.train,
        vocab=inputs.spec.geometry.vocab,
        needs=TeacherNeeds.of(config.actor),
        note=note,
    )


def live_users(
    config: RunConfig,
    limits: EngineLimits,
    turns: LiveTurns,
    key: Key,
    roster: EngineRoster,
    logs: Path,
    note: Callable[[str], None],
) -> LiveUsers:
    """Make the live loop of a run with a gateway. ``key``: secret of the run."""
    assert config.gateway is not None
    gateway, live, run, model = config.gateway, config.live, config.run.folder, config.model.path
    commands = [
        gateway_command(gateway, run, model, number, limits.max_length) for number in range(gateway.processes)
    ]
    judging = None
    if live is not None and live.train:
        judges = partial(
            JudgePool,
            live.judging,
            judge_of_turns(config.judge),
            logs,
            "live",
            of_turns=True,
            model=named_model(config.judge, config.model),
            engines=_askable(config, roster),
        )
        judging = LiveJudging(config.judge, live.judging, turns.verdicts, judges, note)
    return LiveUsers(
        GatewayReceiver(key, turns, roster, limit=gateway.limits.concurrent),
        Gateways(commands, run, logs, note, limit=gateway_limit(config)),
        judging,
        run,
        key,
    )


def _askable(config: RunConfig, roster: EngineRoster) -> Callable[[], bytes]:
    """Return a function that encodes the engines which the judge of live turns may ask now."""
    asks = asks_policy(config.judge)
    if not asks and own_engines(config.judge) is None:
        return bytes
    return lambda: encoded((each.address for each in roster.clients) if asks else (), roster.judge)


def _devices(config: RunConfig, trainer: RunTrainer, roster: EngineRoster) -> Devices:
    interrupt = config.weights.interrupt
    drain_s = config.weights.timeout_s if interrupt == "drain" else None
    engine, publishing = config.rollout.engine, nullcontext
    if drain_s is not None:
        publishing = partial(roster.drained, drain_s)
    if engine.gpu_share is not None:
        return Beside(trainer, publishing)
    if not engine.takes_turns:
        return Separate(publishing)
    return Colocated(
        trainer, roster, pause=PAUSE[interrupt], drain_s=drain_s, timeout_s=config.weights.timeout_s
    )


def _verifier(config: RunConfig, inputs: Inputs, limits: EngineLimits) -> Verifier | None:
    verify = config.weights.verify
    if verify.type == "off":
        return None
    length = min(verify.tokens, limits.max_length - 1)
    prompts = inputs.prompts or inputs.held_out or [Prompt(0, PROBE)]
    return Verifier(
        verify,
        probe_text(prompts, inputs.tokenizer, length),
        config.rollout.engine.quantization or config.model.dtype,
        answer_timeout_s=config.weights.answer_timeout_s,
        timeout_s=config.weights.timeout_s,
    )
