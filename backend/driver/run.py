"""Builds a run from a recipe, runs its loops, and ends everything that it started, on every path."""

import asyncio
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from slipstream.backend.checkpoint.errors import CheckpointError, describe
from slipstream.backend.checkpoint.folder import CHECKPOINTS, CheckpointFolder
from slipstream.backend.cluster.placement import Placement, place
from slipstream.backend.cluster.ray_cluster import create_engine, create_trainer, ray_cluster
from slipstream.backend.driver.checkpointing import TrainerCheckpoints
from slipstream.backend.driver.devices import Colocated, Devices, Separate
from slipstream.backend.driver.inputs import InputError, Inputs, read_inputs
from slipstream.backend.driver.loops import Loops, collection_loop, evaluate_and_record, training_loop
from slipstream.backend.driver.prepare import prepare_inputs
from slipstream.backend.driver.resume import (
    RunState,
    begin,
    can_resume,
    check_same_run,
    find_checkpoint,
    refuse_if_running,
    refuse_without_ledger,
)
from slipstream.backend.driver.served_weights import ServedWeights
from slipstream.backend.driver.stop import Stop, Stopped
from slipstream.backend.driver.trainer_client import RayEngine, Trainer
from slipstream.backend.driver.verification import Verifier, probe_text
from slipstream.backend.monitor.metrics import MetricsLog
from slipstream.backend.monitor.progress import Progress
from slipstream.backend.monitor.recorder import Recorder
from slipstream.backend.monitor.summary import RunSummary, write_summary
from slipstream.backend.monitor.trace import TraceLog
from slipstream.bridge.endpoint import PAUSE
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.base import Section
from slipstream.rollout.collect.gate import AdmissionGate
from slipstream.rollout.collect.time_limit import TimeLimit
from slipstream.rollout.control.concurrency import ConcurrencyController
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.engine.load import follow_load
from slipstream.rollout.engine.pool import EnginePool
from slipstream.rollout.engine.supervisor import Supervisor
from slipstream.rollout.ledger.database import LedgerError
from slipstream.rollout.workflow import WorkflowContext

AnySection = TypeVar("AnySection", bound=Section)

CHECKPOINT = "checkpoint-hf"
"""The trained policy, in the run folder."""


def start_folder(config: RunConfig) -> Path:
    """Make the run folder and write the recipe into it. A folder of an earlier run is set aside.

    Raises LedgerBusy or InputError when that run is still running.
    """
    folder = config.run.folder
    if folder.exists():
        refuse_if_running(folder)
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(folder.stat().st_mtime))
        folder.rename(folder.with_name(f"{folder.name}.{stamp}"))
    (folder / "logs").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe_text(config))
    return folder


def recipe_text(config: RunConfig) -> str:
    """The recipe with every default filled in."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def with_absolute_paths(section: AnySection) -> AnySection:
    """The same settings. Processes on other nodes need not share the driver's working directory."""
    changed: dict[str, Any] = {}
    for name, value in section:
        if isinstance(value, Path):
            changed[name] = value.resolve()
        elif isinstance(value, Section):
            changed[name] = with_absolute_paths(value)
    return section.model_copy(update=changed)


async def run(config: RunConfig, progress: Progress, *, resume: bool = False) -> RunSummary:
    """Run the recipe to its end; the summary is also written to the run folder.

    ``resume``: go on with the run in that folder, if there is one.

    Raises InputError before anything is started, Stopped on a signal, and whatever made the run fail;
    engines, trainer and Ray are ended first.
    """
    stop = Stop(progress)
    return await stop.run(_run(with_absolute_paths(config), progress, resume, stop))


async def _run(config: RunConfig, progress: Progress, resume: bool, stop: Stop) -> RunSummary:
    started = time.monotonic()
    await prepare_inputs(config, progress.phase)
    progress.phase("reading model and prompts")
    inputs = read_inputs(config)
    with ExitStack() as stack:
        folder, state = open_run(config, inputs, progress, resume)
        stack.callback(state.ledger.close)
        metrics = MetricsLog(folder)
        stack.callback(metrics.close)
        trace = TraceLog(folder)
        stack.callback(trace.close)
        metrics.log(state.version, {"run/recipe": f"```yaml\n{recipe_text(config)}```"})
        progress.phase("starting Ray")
        nodes = stack.enter_context(ray_cluster(config))
        placement = place(nodes, config)
        loops = build(config, inputs, state, placement, folder, metrics, trace, progress, started)
        end: Literal["done", "failed", "stopped"] = "failed"
        try:
            await drive(loops, state, folder, progress, stop)
            end = "done"
        except (asyncio.CancelledError, Stopped):
            end = "stopped"
            raise
        finally:
            await loops.checkpoints.cancel()
            await loops.weights.cancel()
            await asyncio.shield(loops.supervisor.stop())
            loops.trainer.kill()
            summary = loops.recorder.summary(end)
            try:
                write_summary(folder, summary)
            except OSError as error:
                progress.note(f"no summary.json: {describe(error)}")
        return summary


def open_run(config: RunConfig, inputs: Inputs, progress: Progress, resume: bool) -> tuple[Path, RunState]:
    """The run folder, and where the run stands: at its beginning, or where its last process has left it.

    Raises InputError when the folder cannot be used.
    """
    folder = config.run.folder
    try:
        if resume and can_resume(folder):
            check_same_run(config)
            progress.phase("checking the last checkpoint")
            state = begin(config, inputs, find_checkpoint(config))
            (folder / "recipe.yaml").write_text(recipe_text(config))
        else:
            if resume:
                refuse_without_ledger(folder)
                progress.note(f"nothing to resume in {folder}: the run starts from the beginning")
            start_folder(config)
            state = begin(config, inputs, None)
    except (LedgerError, CheckpointError) as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"cannot use {folder}: {describe(error)}") from error
    for note in state.notes:
        progress.note(note)
    return folder, state


def build(
    config: RunConfig,
    inputs: Inputs,
    state: RunState,
    placement: Placement,
    folder: Path,
    metrics: MetricsLog,
    trace: TraceLog,
    progress: Progress,
    started: float,
) -> Loops:
    """Everything that the loops work on. Actors are created, but nothing is started yet."""
    rollout, logs = config.rollout, folder / "logs"
    ranks = create_trainer(config, placement, logs)
    trainer = Trainer(ranks, step_timeout_s=config.run.step_timeout_s, logs=logs)
    pool = EnginePool(
        max_concurrent=rollout.max_concurrent,
        wait_timeout_s=rollout.engine.start_timeout_s,
        isolate_versions=config.weights.interrupt == "in_place",
        trace=lambda request: trace.write("request", **asdict(request)),
    )
    pool.version = state.version
    episode_limit = TimeLimit(rollout.episode_timeout_s)
    devices = make_devices(config, trainer, pool, episode_limit)
    weights = ServedWeights(trainer, pool, devices, verifier=make_verifier(config, inputs))
    supervisor = Supervisor(
        engine_handles(config, inputs, placement, logs, trainer, devices),
        pool,
        weights.bring_up_to_date,
        restarts=rollout.engine.restarts,
        note=progress.note,
    )
    gate = AdmissionGate(state.control, state.intake, state.ledger, lambda *lost: recorder.lost(*lost))
    recorder = Recorder(
        metrics,
        progress,
        gate,
        pool,
        lambda: supervisor.restarts,
        started=started,
        resumed=state.ledger.epoch,
        trace=trace,
    )
    checkpoints = TrainerCheckpoints(
        config.checkpoint,
        CheckpointFolder(
            folder / CHECKPOINTS,
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
        ),
        trainer,
        weights.begin_checkpoint,
        state.ledger,
        recorder,
        last_step=state.step,
    )
    return Loops(
        config=config,
        gate=gate,
        journal=state.ledger,
        pool=pool,
        trainer=trainer,
        weights=weights,
        supervisor=supervisor,
        held_out=inputs.held_out,
        workflow=inputs.workflow,
        context=WorkflowContext(pool, inputs.tokenizer, inputs.reward, rollout.sampling),
        group_filter=inputs.group_filter,
        recorder=recorder,
        checkpoints=checkpoints,
        episode_limit=episode_limit,
    )


def make_devices(config: RunConfig, trainer: Trainer, pool: EnginePool, episodes: TimeLimit) -> Devices:
    interrupt = config.weights.interrupt
    drain_s = config.weights.timeout_s if interrupt == "drain" else None
    if not config.rollout.engine.colocated:
        return Separate(pool, drain_s=drain_s)
    return Colocated(
        trainer,
        pool,
        pause=PAUSE[interrupt],
        drain_s=drain_s,
        timeout_s=config.weights.timeout_s,
        episodes=episodes,
    )


def make_verifier(config: RunConfig, inputs: Inputs) -> Verifier | None:
    verify = config.weights.verify
    if verify.type == "off":
        return None
    length = min(verify.tokens, inputs.spec.geometry.max_positions - 1)
    text = probe_text(inputs.prompts, inputs.tokenizer, length)
    return Verifier(
        verify,
        text,
        config.model.dtype,
        answer_timeout_s=config.weights.answer_timeout_s,
        timeout_s=config.weights.timeout_s,
    )


def engine_handles(
    config: RunConfig,
    inputs: Inputs,
    placement: Placement,
    logs: Path,
    trainer: Trainer,
    devices: Devices,
) -> list[RayEngine]:
    """One handle per engine; the actors come into being when the supervisor starts them."""
    engine, geometry = config.rollout.engine, inputs.spec.geometry
    trainers_turn_s = config.run.step_timeout_s if engine.colocated else 0.0

    def create(number: int) -> Any:
        return create_engine(config, placement, number, logs, trainer.gpus)

    def address(name: str, url: str) -> EngineAddress:
        return EngineAddress(
            name,
            url,
            ranks=engine.tensor_parallel,
            vocab_size=geometry.vocab,
            max_length=geometry.max_positions,
            timeout_s=engine.request_timeout_s + trainers_turn_s,
            stream_interval=engine.stream_interval,
        )

    return [
        RayEngine(
            f"engine-{number}",
            partial(create, number),
            address,
            timeout_s=engine.start_timeout_s + 60,
            turn=devices.starting,
        )
        for number in range(engine.count)
    ]


async def drive(loops: Loops, state: RunState, folder: Path, progress: Progress, stop: Stop) -> None:
    """The run's course: start or restore, evaluate, train while collecting, evaluate, export.

    When a loop fails, the task group cancels the others and raises what it raised. Raises Stopped when the
    run was asked to end; a checkpoint has been taken then.
    """
    serving = asyncio.Event()
    await state.ledger.flushed()
    async with asyncio.TaskGroup() as tasks:
        keeping = [tasks.create_task(loops.supervisor.run(serving), name="serving")]
        progress.phase("starting the engines and the trainer")
        await loops.weights.connect(state.checkpoint.path if state.checkpoint else None)
        await serving.wait()
        if loops.held_out and not state.ledger.epoch:
            progress.phase("evaluating the initial policy")
            await evaluate_and_record(loops, 0)
        progress.phase("training")
        loops.recorder.training_begins()
        if loops.config.rollout.engine.adaptive_concurrency:
            controller = ConcurrencyController(maximum=loops.config.rollout.max_concurrent)
            keeping.append(tasks.create_task(follow_load(loops.pool, controller), name="concurrency"))
        collecting = tasks.create_task(collection_loop(loops), name="collection")
        with stop.by("stopping behind this step; again to stop at once", loops.gate.end):
            await training_loop(loops)
        loops.recorder.training_ends()
        collecting.cancel()
        await asyncio.wait({collecting})
        await loops.weights.settled()  # or the question about the last version would be aborted as well
        await loops.pool.abort_running()
        await loops.checkpoints.last(loops.gate)
        if not stop.asked:
            await show_result(loops, folder, progress)
        for task in keeping:
            task.cancel()
    if stop.asked:
        raise Stopped


async def show_result(loops: Loops, folder: Path, progress: Progress) -> None:
    """Evaluate the trained policy, and write it for others to load."""
    if loops.held_out:
        progress.phase("evaluating the trained policy")
        await evaluate_and_record(loops, loops.gate.version)
    progress.phase("writing the trained policy")
    await loops.weights.export_hf(folder / CHECKPOINT)
