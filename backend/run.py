"""Builds a run from a recipe, runs its loops, and ends everything that it started, on every path."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import yaml

from backend.cluster import create_engine, create_trainer, ray_cluster
from backend.inputs import Inputs, read_inputs
from backend.loops import Loops, collection_loop, evaluate_and_record, training_loop
from backend.monitor.metrics import MetricsLog
from backend.monitor.progress import Progress
from backend.monitor.summary import RunSummary, write_summary
from backend.placement import Placement, place
from backend.prepare import prepare_inputs
from backend.recorder import Recorder
from backend.remote import RayEngine, Trainer
from backend.served_weights import ServedWeights
from configs.schema import RunConfig
from rollout.control.core import RolloutControl
from rollout.control.gate import AdmissionGate
from rollout.data import PromptStream
from rollout.engine.client import EngineAddress
from rollout.engine.pool import EnginePool
from rollout.engine.supervisor import Supervisor
from rollout.workflow import WorkflowContext

CHECKPOINT = "checkpoint-hf"
"""The trained policy, in the run folder."""


class Stopped(Exception):
    """The user or the scheduler asked the run to end."""


def start_folder(config: RunConfig) -> Path:
    """Make the run folder and write the recipe into it. A folder of an earlier run is set aside."""
    folder = config.run.folder
    if folder.exists():
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(folder.stat().st_mtime))
        folder.rename(folder.with_name(f"{folder.name}.{stamp}"))
    (folder / "logs").mkdir(parents=True)
    recipe = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Processes on other nodes need not share the driver's working directory."""

    def absolute(section, **paths):
        return section.model_copy(update={name: path.resolve() for name, path in paths.items()})

    return config.model_copy(
        update={
            "run": absolute(config.run, root=config.run.root),
            "model": absolute(config.model, path=config.model.path),
            "data": absolute(config.data, path=config.data.path),
            "eval": config.eval and absolute(config.eval, path=config.eval.path),
        }
    )


@contextmanager
def stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call ``stop`` once; further ones are ignored, so that clean-up is not cut short."""
    loop = asyncio.get_running_loop()
    pending = [stop]

    def once() -> None:
        if pending:
            pending.pop()()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, once)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def run(config: RunConfig, progress: Progress) -> RunSummary:
    """Run the recipe to its end; the summary is also written to the run folder.

    Raises InputError before anything is started, Stopped on a signal, and whatever made the run fail;
    engines, trainer and Ray are ended first.
    """
    task = asyncio.ensure_future(_run(with_absolute_paths(config), progress))
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        progress.phase("stopping")
        task.cancel()

    with stop_signals(stop):
        try:
            return await task
        except asyncio.CancelledError:
            if stopped:
                raise Stopped from None
            raise


async def _run(config: RunConfig, progress: Progress) -> RunSummary:
    started = time.monotonic()
    await prepare_inputs(config, progress.phase)
    progress.phase("reading model and prompts")
    inputs = read_inputs(config)
    folder = start_folder(config)
    progress.phase("starting Ray")
    with ExitStack() as stack:
        nodes = stack.enter_context(ray_cluster(config))
        placement = place(nodes, config)
        metrics = MetricsLog(folder)
        stack.callback(metrics.close)
        metrics.log(0, {"run/recipe": f"```yaml\n{(folder / 'recipe.yaml').read_text()}```"})
        loops = build(config, inputs, placement, folder, metrics, progress, started)
        end: Literal["done", "failed", "stopped"] = "failed"
        try:
            await drive(loops, folder, progress)
            end = "done"
        except asyncio.CancelledError:
            end = "stopped"
            raise
        finally:
            summary = loops.recorder.summary(end)
            write_summary(folder, summary)
            await asyncio.shield(loops.supervisor.stop())
            loops.trainer.kill()
        return summary


def build(
    config: RunConfig,
    inputs: Inputs,
    placement: Placement,
    folder: Path,
    metrics: MetricsLog,
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
    )
    weights = ServedWeights(trainer, pool)
    supervisor = Supervisor(
        engine_handles(config, inputs, placement, logs),
        pool,
        weights.bring_up_to_date,
        restarts=rollout.engine.restarts,
        note=progress.note,
    )
    gate = AdmissionGate(
        RolloutControl(rollout.batch_size, rollout.max_head_offpolicyness, last_version=config.run.steps)
    )
    return Loops(
        config=config,
        gate=gate,
        pool=pool,
        trainer=trainer,
        weights=weights,
        supervisor=supervisor,
        prompts=PromptStream(inputs.prompts, shuffle=config.data.shuffle, seed=config.run.seed),
        held_out=inputs.held_out,
        workflow=inputs.workflow,
        context=WorkflowContext(pool, inputs.tokenizer, inputs.reward, rollout.sampling),
        group_filter=inputs.group_filter,
        recorder=Recorder(metrics, progress, gate, pool, lambda: supervisor.restarts, started=started),
    )


def engine_handles(config: RunConfig, inputs: Inputs, placement: Placement, logs: Path) -> list[RayEngine]:
    """One handle per engine; the actors come into being when the supervisor starts them."""
    engine, geometry = config.rollout.engine, inputs.spec.geometry

    def address(name: str, url: str) -> EngineAddress:
        return EngineAddress(
            name,
            url,
            ranks=engine.tensor_parallel,
            vocab_size=geometry.vocab,
            max_length=geometry.max_positions,
            timeout_s=engine.request_timeout_s,
        )

    return [
        RayEngine(
            f"engine-{number}",
            partial(create_engine, config, placement, number, logs),
            address,
            timeout_s=engine.start_timeout_s + 60,
        )
        for number in range(engine.count)
    ]


async def drive(loops: Loops, folder: Path, progress: Progress) -> None:
    """The run's course: start, evaluate, train while collecting, evaluate, export.

    When a loop fails, the task group cancels the others and raises what it raised.
    """
    serving = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(loops.supervisor.run(serving), name="serving")
        progress.phase("starting the engines and the trainer")
        await loops.trainer.connect()
        await serving.wait()
        if loops.held_out:
            progress.phase("evaluating the initial policy")
            await evaluate_and_record(loops, 0)
        progress.phase("training")
        loops.recorder.training_begins()
        collecting = tasks.create_task(collection_loop(loops), name="collection")
        await training_loop(loops)
        loops.recorder.training_ends()
        collecting.cancel()
        await asyncio.wait({collecting})
        await loops.pool.abort_running()
        if loops.held_out:
            progress.phase("evaluating the trained policy")
            await evaluate_and_record(loops, loops.gate.version)
        progress.phase("writing the trained policy")
        await loops.trainer.export_hf(folder / CHECKPOINT)
        keeping.cancel()
