"""The two halves of a run alone, on the code of the whole one, for profiling and debugging.

    rollout half: prompts, engines, rewards ──► batches/step-N.safetensors      (``run`` without ``trains``)
    trainer half: batches/step-N.safetensors ──► trainer ranks ──► metrics      (``run_trainer_half``)

The rollout half has no trainer: versions move on, and the weights stay. The trainer half has no engine: the
policy begins with ``model.path`` and trains on the batches in their order, however they came about.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from slipstream.backend.batch.saved import BATCH_FILES, BATCHES, BatchFileError, read_batch
from slipstream.backend.batch.train_batch import EncodedBatch, StalenessViolation, check_staleness
from slipstream.backend.cluster.actors import create_ranks
from slipstream.backend.cluster.object_store import batch_bytes
from slipstream.backend.cluster.placement import place_trainer
from slipstream.backend.cluster.rank_group import RankGroup
from slipstream.backend.cluster.ray_cluster import ray_cluster
from slipstream.backend.driver.loops.job_end import job_end
from slipstream.backend.driver.loops.stop import Stop, Stopped
from slipstream.backend.driver.start.hub_models import record_commits, with_local_models
from slipstream.backend.driver.start.inputs import InputError
from slipstream.backend.driver.start.prepare import prepare_inputs
from slipstream.backend.driver.start.run_folder import (
    LOGS,
    goes_on,
    permissions,
    recipe_text,
    start_folder,
    treatment,
    with_absolute_paths,
)
from slipstream.backend.driver.start.run_length import with_steps
from slipstream.backend.driver.weights.ranked_trainer import RankedTrainer
from slipstream.backend.driver.weights.skipped import SkippedUpdateLimit, skipped_in
from slipstream.backend.monitor.metrics import MetricsLog
from slipstream.backend.monitor.progress import Progress
from slipstream.backend.monitor.recorder import training_metrics
from slipstream.backend.monitor.trackers.opened import open_trackers
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.model.geometry import Geometry
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.weights import VerifyOff
from slipstream.rollout.ledger.storage.database import LedgerError
from slipstream.rollout.system import plugins

PROGRESS_LINES = 50
"""Number of progress lines to print."""


def rollout_half(config: RunConfig) -> RunConfig:
    """Return the recipe of a run that saves its batches: what needs a trainer is left out of it.

    It has a run folder of its own, so that the run itself can be beside it.
    """
    engine = config.rollout.engine.model_copy(update={"colocated": False})
    return _named(config, "rollout-only").model_copy(
        update={
            "eval": None,
            "rollout": config.rollout.model_copy(update={"engine": engine}),
            "weights": config.weights.model_copy(update={"verify": VerifyOff()}),
            "checkpoint": config.checkpoint.model_copy(update={"every": 0}),
        }
    )


def trainer_half(config: RunConfig) -> RunConfig:
    """Return the recipe of a run that trains on saved batches, with a run folder of its own."""
    return _named(config, "train-only")


def _named(config: RunConfig, suffix: str) -> RunConfig:
    run = config.run.model_copy(update={"name": f"{config.run.name}-{suffix}"})
    return config.model_copy(update={"run": run})


def saved_in(config: RunConfig) -> Path:
    """Return the folder in which a rollout half saves its batches."""
    return config.run.folder / BATCHES


def saved_batches(config: RunConfig, folder: Path) -> list[Path]:
    """Return the files of saved batches, as many as the recipe has steps, in their order; all of them if it
    has epochs.

    ``folder``: with the files, or the run folder of a rollout half. Raises InputError with all problems that
    can be seen without reading them.
    """
    for place in (folder / BATCHES, folder):
        if files := sorted(place.glob(BATCH_FILES)):
            break
    else:
        raise InputError(
            f"--debug-train-only: no {BATCH_FILES} found in {folder} or {folder / BATCHES}: expected batches "
            "that --debug-rollout-only has saved"
        )
    steps = config.run.steps
    if steps is not None and len(files) < steps:
        raise InputError(
            f"--debug-train-only: {len(files)} batches found in {files[0].parent}, {steps} "
            f"expected for run.steps: save more, or set run.steps={len(files)}"
        )
    return files[:steps]


async def run_trainer_half(
    config: RunConfig, folder: Path, progress: Progress, *, overwrite: bool = False
) -> Path:
    """Train on the saved batches of ``folder``. Return the run folder, which has metrics and no weights.

    ``config``: from ``trainer_half``. Raises InputError before anything is started, Stopped on a signal, and
    whatever made the run fail.
    """
    stop = Stop(progress, job_end(config, os.environ, time.time()))
    return await stop.run(_run(with_absolute_paths(config), folder, progress, stop, overwrite))


async def _run(config: RunConfig, batches: Path, progress: Progress, stop: Stop, overwrite: bool) -> Path:
    files = saved_batches(config, batches)
    config = with_steps(config, len(files))
    named, config = config, await with_local_models(config, progress.phase)
    await prepare_inputs(config, progress.phase)
    progress.phase("checking the saved batches")
    longest = _checked(config, files)
    with permissions(config), ExitStack() as stack:
        try:
            resume = goes_on(config, progress, resume=False)
            lease = await start_folder(config, progress, treatment(resume=resume, overwrite=overwrite))
        except LedgerError as error:
            raise InputError(str(error)) from error
        stack.enter_context(lease.held(stop.fail))
        run = config.run.folder
        record_commits(named, config)
        progress.keep_in(run)
        recipe = recipe_text(config)
        metrics = MetricsLog(run, open_trackers(config, recipe, progress.note), note=progress.note)
        stack.callback(metrics.close)
        metrics.log(0, {"run/recipe": f"```yaml\n{recipe}```"})
        progress.phase("starting Ray")
        nodes = stack.enter_context(ray_cluster(config, batch_bytes=longest, note=progress.note))
        logs, timeout_s = run / LOGS, config.run.step_timeout_s
        actors = partial(create_ranks, config, place_trainer(nodes, config), logs)
        trainer = RankedTrainer(RankGroup(actors, timeout_s=timeout_s, logs=logs), step_timeout_s=timeout_s)
        stack.callback(trainer.kill)
        progress.phase("starting the trainer")
        await trainer.connect()
        await _train(config, files, trainer, metrics, progress, stop)
        await trainer.flush()
    if stop.asked:
        raise Stopped
    return run


async def _train(
    config: RunConfig,
    files: Sequence[Path],
    trainer: RankedTrainer,
    metrics: MetricsLog,
    progress: Progress,
    stop: Stop,
) -> None:
    skipped = SkippedUpdateLimit(config.run.max_skipped_updates, progress.note)
    for step, file in enumerate(files, 1):
        if stop.asked:
            return
        batch = read_batch(file)
        began = time.monotonic()
        trained: Mapping[str, float] = await trainer.train(batch)
        seconds = time.monotonic() - began
        metrics.log(step, {**training_metrics(batch.headers, trained, seconds), "train/step": step})
        if step in (1, len(files)) or step % -(-len(files) // PROGRESS_LINES) == 0:
            loss = f"{trained['train/loss']:.4f}" if "train/loss" in trained else "not finite"
            tokens_per_s = trained["train/tokens"] / seconds
            progress.phase(f"step {step}/{len(files)}, loss {loss}, {tokens_per_s:,.0f} tok/s")
        skipped.add(step, await skipped_in(trainer, trained))


def _checked(config: RunConfig, files: Sequence[Path]) -> int:
    """Return the number of bytes of the largest batch. Raises InputError with everything that is wrong."""
    problems: list[str] = []
    largest = 0
    try:
        geometry = model_spec(config.model.path, plugins.resolved(config.model.families)).geometry
    except (UnsupportedModel, OSError, ValueError) as error:
        raise InputError(f"model.path: {error}") from error
    for file in files:
        try:
            batch = read_batch(file)
        except (BatchFileError, OSError) as error:
            problems.append(str(error))
            continue
        largest = max(largest, batch.chunks.nbytes)
        problems += [f"{file}: {problem}" for problem in _problems(config, geometry, batch)]
    if problems:
        raise InputError("\n".join(problems))
    # Ray's store holds as much as a whole run's batch may have.
    return max(largest, batch_bytes(1, geometry.max_positions))


def _problems(config: RunConfig, geometry: Geometry, batch: EncodedBatch) -> list[str]:
    decoded, problems = batch.decoded(), list[str]()
    largest = max(int(trajectory.tokens_T.max(initial=0)) for trajectory in decoded.trajectories)
    if largest >= geometry.vocab:
        problems.append(
            f"token id {largest} found, less than {geometry.vocab} expected: the batch was saved with "
            "another model than model.path"
        )
    length = max(len(trajectory.tokens_T) for trajectory in decoded.trajectories)
    if length > geometry.max_positions:
        problems.append(
            f"a trajectory of {length} tokens found, at most {geometry.max_positions} expected "
            "(max_position_embeddings of model.path)"
        )
    try:
        check_staleness(decoded, config.rollout.max_head_offpolicyness)
    except StalenessViolation as error:
        problems.append(str(error))
    return problems
