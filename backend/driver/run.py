"""The course of a run, from its recipe to its summary. Everything that is started here ends on every path.

inputs ──► run folder, ledger ──► Ray ──► assemble ──► serving, collection, training ──► export ──► summary
"""

import asyncio
import os
import time
from contextlib import ExitStack, aclosing, closing
from functools import partial
from typing import Literal

from slipstream.backend.cluster.node_usage import NodeUsages
from slipstream.backend.cluster.object_store import batch_bytes
from slipstream.backend.cluster.placement import place
from slipstream.backend.cluster.ray_cluster import driver_address, ray_cluster
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.driver.assemble import Parts, assemble
from slipstream.backend.driver.loops.collection import collection_loop, keep_collecting
from slipstream.backend.driver.loops.job_end import job_end
from slipstream.backend.driver.loops.own_loop import OwnLoop
from slipstream.backend.driver.loops.serving import serving_loop
from slipstream.backend.driver.loops.stop import Stop, Stopped
from slipstream.backend.driver.loops.training import position_of, training_loop, training_steps
from slipstream.backend.driver.processes.gateways import announcement
from slipstream.backend.driver.start.engine_model import write_engine_model
from slipstream.backend.driver.start.hub_models import record_commits, with_local_models
from slipstream.backend.driver.start.inputs import read_inputs
from slipstream.backend.driver.start.job import note_progress
from slipstream.backend.driver.start.prepare import prepare_inputs
from slipstream.backend.driver.start.resume import RunState, open_run
from slipstream.backend.driver.start.run_folder import (
    CHECKPOINT_HF,
    LOGS,
    permissions,
    recipe_text,
    with_absolute_paths,
)
from slipstream.backend.driver.start.run_length import in_steps, length_note
from slipstream.backend.driver.weights.transports import PlannedSeconds, unplanned
from slipstream.backend.monitor.metrics import MetricsLog
from slipstream.backend.monitor.progress import Progress
from slipstream.backend.monitor.recorder import Recorder
from slipstream.backend.monitor.sample_episodes import EpisodeSamples
from slipstream.backend.monitor.side import SideMetrics
from slipstream.backend.monitor.summary import SUMMARY_FILE, RunSummary, write_summary
from slipstream.backend.monitor.trace_log import TraceLog
from slipstream.backend.monitor.trackers.opened import open_trackers
from slipstream.configs.installed import untested_fields
from slipstream.configs.schema import RunConfig
from slipstream.rollout.ledger.writing.writer import Ledger
from slipstream.rollout.reward import is_accuracy
from slipstream.rollout.system.disk import describe
from slipstream.rollout.system.garbage import OF_RECORDED_EPISODE, look_seldom_for_garbage


async def run(
    config: RunConfig,
    progress: Progress,
    *,
    resume: bool = False,
    accept_changes: bool = False,
    overwrite: bool = False,
    trains: bool = True,
    own: OwnLoop | None = None,
    planned_s: PlannedSeconds = unplanned,
) -> RunSummary:
    """Run the recipe to its end. The summary is also written to the run folder.

    ``resume``: go on with the run in that folder, if there is one; with ``accept_changes`` also if the
    content of its inputs has changed. ``overwrite``: delete it instead. With neither it is refused.
    Without ``trains``, batches are saved in place of being trained (``halves.rollout_half``). ``own``:
    the loop of somebody who takes the training steps and evaluates; None: ``training_loop``. ``planned_s``:
    returns the seconds that the plan of a recipe gives a publication.

    Raises InputError before anything is started, Stopped on a signal, and whatever made the run fail;
    engines, trainer and Ray have ended by then.
    """
    stop = Stop(progress, job_end(config, os.environ, time.time()))
    if own is not None:
        own.can_be_stopped_by(stop.ask)
    config = with_absolute_paths(config)
    return await stop.run(
        _run(config, progress, resume, accept_changes, overwrite, stop, trains, own, planned_s)
    )


async def _run(
    config: RunConfig,
    progress: Progress,
    resume: bool,
    accept_changes: bool,
    overwrite: bool,
    stop: Stop,
    trains: bool,
    own: OwnLoop | None,
    planned_s: PlannedSeconds,
) -> RunSummary:
    started = time.monotonic()
    named, config = config, await with_local_models(config, progress.phase, resume=resume)
    await prepare_inputs(config, progress.phase)
    progress.phase("reading model and prompts")
    inputs = read_inputs(config, trains=trains)
    if (epochs := config.run.epochs) is not None:
        config = in_steps(config, len(inputs.prompts))
        progress.lasts(config.run.total_steps)
        progress.note(length_note(epochs, len(inputs.prompts), config.run.total_steps))
    if own is not None:
        own.total_steps = config.run.total_steps
    with permissions(config), ExitStack() as stack:
        folder, state = await open_run(
            config, inputs, progress, resume, accept_changes, overwrite=overwrite, whole=trains
        )
        stop.goes_on(folder)
        stack.enter_context(state.lease.held(stop.fail))
        stack.callback(state.ledger.close)
        record_commits(named, config)
        progress.keep_in(folder)
        for note in inputs.notes:
            progress.note(note)
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        recipe = recipe_text(config)
        metrics = MetricsLog(folder, open_trackers(config, recipe, progress.note), note=progress.note)
        stack.callback(metrics.close)
        trace = TraceLog(folder, note=progress.note)
        stack.callback(trace.close)
        metrics.log(state.control.version, {"run/recipe": f"```yaml\n{recipe}```"})
        await write_engine_model(config, inputs.engine_model, progress.phase, again=accept_changes)
        progress.phase("starting Ray")
        n_samples = config.rollout.n_samples_per_prompt
        trajectories = config.rollout.batch_size * n_samples
        largest = batch_bytes(trajectories, inputs.spec.geometry.max_positions)
        nodes = stack.enter_context(ray_cluster(config, batch_bytes=largest, note=progress.note))
        usages = NodeUsages(nodes, is_local=config.cluster.type == "local")
        sources = (usages.metrics, EpisodeSamples(folder).metrics)
        side = stack.enter_context(closing(SideMetrics(sources, progress.note)))
        recorder = Recorder(
            metrics,
            progress,
            trace,
            started=started,
            resumed=state.ledger.epoch,
            is_accuracy=bool(inputs.prompts or inputs.held_out) and is_accuracy(inputs.reward),
            beside=side.latest,
            prompts_left_out=inputs.left_out,
            untested=untested_fields(config),
            on_step=stop.step_done,
            on_checkpoint=partial(_committed, stop),
        )
        parts = assemble(
            config,
            inputs,
            state,
            place(nodes, config, trains=trains),
            folder / LOGS,
            recorder,
            trains=trains,
            planned_s=planned_s,
        )
        look_seldom_for_garbage(OF_RECORDED_EPISODE * state.control.capacity * n_samples)
        end: Literal["done", "failed", "stopped"] = "failed"
        try:
            await _course(config, parts, state, recorder, progress, stop, trains, own)
            end = "done"
        except (asyncio.CancelledError, Stopped):
            end = "stopped"
            raise
        finally:
            await parts.checkpoints.cancel()
            await parts.weights.cancel()
            if parts.live is not None:  # before the engines: users get a whole answer or an error
                await asyncio.shield(parts.live.stop())
            if parts.hooks is not None:
                await asyncio.shield(parts.hooks.close())
            if parts.drawing is not None:
                await asyncio.shield(parts.drawing.close())
            await asyncio.shield(parts.supervisor.stop())
            if parts.judge is not None:
                await asyncio.shield(parts.judge.stop())
            parts.trainer.kill()
            summary = recorder.summary(end, parts.status())
            try:
                state.lease.check()
                write_summary(folder, summary)
            except OSError as error:
                progress.note(f"no summary.json: {describe(error)}")
        return summary


def _committed(stop: Stop, step: int, seconds: float) -> None:
    stop.checkpoint_done(seconds)
    note_progress(os.environ, step)


async def _course(
    config: RunConfig,
    parts: Parts,
    state: RunState,
    recorder: Recorder,
    progress: Progress,
    stop: Stop,
    trains: bool,
    own: OwnLoop | None,
) -> None:
    """Start or restore, evaluate, train while collecting, evaluate, export.

    When a loop fails, the task group cancels the others and raises what the loop raised. Raises Stopped when
    the run was asked to end; a checkpoint has been taken by then, unless the trainer was being restarted.
    """
    weights, evaluation = parts.weights, parts.evaluation
    serving, judge_serving, training = asyncio.Event(), asyncio.Event(), asyncio.Event()
    await state.ledger.flushed()
    async with asyncio.TaskGroup() as tasks:
        serving_task = tasks.create_task(
            serving_loop(parts.supervisor, parts.roster, parts.controller, serving, training), name="serving"
        )
        judge_task = None
        if parts.judge is not None:
            judge_task = tasks.create_task(parts.judge.run(judge_serving), name="the judge's engines")
        collectors_task = tasks.create_task(
            keep_collecting(parts.server, parts.collectors, driver_address(config.cluster)), name="collectors"
        )
        joined_task = tasks.create_task(
            parts.joined.keep(driver_address(config.cluster)), name="engines from outside"
        )
        drawing_task = None
        if parts.drawing is not None:
            drawing_task = tasks.create_task(parts.drawing.run(), name="drawing of prompts")
        live_task = None
        if parts.live is not None:
            live_task = tasks.create_task(parts.live.keep(driver_address(config.cluster)), name="live users")
        progress.phase("starting the engines and the trainer")
        async with weights.starting():
            await parts.trainer.connect()
            if state.checkpoint is not None:
                await parts.trainer.restore(state.checkpoint.path)
        revival_task = tasks.create_task(parts.revival.run(), name="revival")
        await serving.wait()
        if judge_task is not None:
            await judge_serving.wait()
        if config.gateway is not None:
            progress.note(announcement(config.gateway, config.run.folder, os.environ))
        if parts.collectors.count:
            await parts.server.first_collector(config.rollout.engine.start_timeout_s)
        step = parts.gate.core.step
        due_first = evaluation is not None and evaluation.is_due_first(step, config.run.folder)
        if evaluation is not None and due_first and own is None:
            progress.phase("evaluating the initial policy")
            await evaluation.run(0)
        recorder.training_begins(parts.status())
        training.set()
        is_done = False
        while not is_done:
            progress.phase("training")
            await _train(config, parts, state, recorder, tasks, stop, own)
            recorder.training_ends()
            if trains:
                is_done = await _finished(config, parts, progress, stop, evaluates=own is None)
            else:
                await parts.trainer.flush()
                is_done = True
        if parts.turns is not None and not config.has_prompts and not stop.asked:
            parts.turns.training_ends()
            progress.phase("trained to the last step; serving until Ctrl-C or SIGTERM")
            with stop.by("stopping", parts.batches.end):
                await parts.batches.ended()
        if parts.lost is not None:
            await parts.lost.flush()
        revival_task.cancel()
        if drawing_task is not None:
            drawing_task.cancel()
        if live_task is not None:
            live_task.cancel()
        joined_task.cancel()
        serving_task.cancel()
        if judge_task is not None:
            judge_task.cancel()
        collectors_task.cancel()
    if stop.asked:
        raise Stopped


async def _train(
    config: RunConfig,
    parts: Parts,
    state: RunState,
    recorder: Recorder,
    tasks: asyncio.TaskGroup,
    stop: Stop,
    own: OwnLoop | None,
) -> None:
    """Train while collecting, until every step is done or the run is asked to end."""
    collecting = tasks.create_task(collection_loop(parts.gate, parts.assignments), name="collection")
    with stop.by("stopping after this step; again to stop at once", parts.batches.end):
        steps = training_steps(
            config.run,
            parts.batches,
            parts.weights,
            parts.checkpoints,
            recorder,
            parts.status,
            partial(_read, state.ledger),
            state.feedback,
            parts.hooks,
        )
        async with aclosing(steps):
            if own is None:
                await training_loop(steps, config.run, parts.batches, parts.evaluation)
            else:
                await own.run(steps, parts.batches, parts.evaluation)
    collecting.cancel()
    await asyncio.wait({collecting})
    await parts.assignments.close()


async def _finished(
    config: RunConfig, parts: Parts, progress: Progress, stop: Stop, *, evaluates: bool
) -> bool:
    """Take the last checkpoint, evaluate if ``evaluates``, and export.

    Return False if the trainer has died meanwhile and was restored, so that steps may have to be done again.
    """
    batches, weights, life = parts.batches, parts.weights, parts.weights.life
    if stop.asked and not life.is_alive:
        return True  # the newest checkpoint is all that there is of its state
    try:
        await life.alive()
        if batches.core.step < config.run.total_steps and not batches.is_ended:
            return False
        await weights.settled()
        await parts.checkpoints.last(position_of(batches))
        if stop.asked:
            await parts.trainer.flush()
            return True
        if parts.evaluation is not None and evaluates:
            progress.phase("evaluating the trained policy")
            await parts.evaluation.run(batches.core.version)
        await life.alive()
        if batches.core.step < config.run.total_steps and not batches.is_ended:
            return False
        progress.phase("writing the trained policy")
        async with weights.trainers_turn():
            await parts.trainer.export_hf(config.run.folder / CHECKPOINT_HF)
    except TrainerFailed as error:
        life.fail(error)
        return stop.asked
    return True


async def _read(ledger: Ledger, refs: list[bytes]) -> list[bytes]:
    """Return the chunks of each trajectory. Raises LedgerError."""
    return await asyncio.to_thread(lambda: [ledger.read(each) for each in refs])
