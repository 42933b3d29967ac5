"""``slipstream sft``: examples ──► batches ──► the trainer ──► an HF checkpoint.

For the trainer a response is a trajectory with reward 1 that its present policy has sampled
(``configs/supervised.py``). A reward model is trained by ``RewardModelRank`` on pairs of such trajectories.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from slipstream.backend.batch.train_batch import demonstrated
from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.checkpoint.folder import CHECKPOINTS, CheckpointFolder, FoundCheckpoint
from slipstream.backend.cluster.actors import create_ranks
from slipstream.backend.cluster.object_store import batch_bytes
from slipstream.backend.cluster.placement import place_trainer
from slipstream.backend.cluster.rank_group import RankGroup
from slipstream.backend.cluster.ray_cluster import ray_cluster
from slipstream.backend.driver.loops.job_end import job_end
from slipstream.backend.driver.loops.stop import Stop, Stopped
from slipstream.backend.driver.ports import RunPosition
from slipstream.backend.driver.start.data_checks import example_checks, template_problems
from slipstream.backend.driver.start.hub_models import record_commits, with_local_models
from slipstream.backend.driver.start.inputs import HfTokenizer, InputError, adapter_problems, read_tokenizer
from slipstream.backend.driver.start.job import note_progress
from slipstream.backend.driver.start.prepare import prepare_inputs
from slipstream.backend.driver.start.run_folder import (
    CHECKPOINT_HF,
    LOGS,
    RECIPE,
    can_resume,
    goes_on,
    permissions,
    recipe_text,
    resume_folder,
    start_folder,
    treatment,
    with_absolute_paths,
    write_recipe,
)
from slipstream.backend.driver.start.run_length import in_steps, length_note
from slipstream.backend.driver.start.targets import NoTarget, answer_of, token_pair
from slipstream.backend.driver.weights.checkpointing import NoHistory, TrainerCheckpoints
from slipstream.backend.driver.weights.ranked_trainer import RankedTrainer
from slipstream.backend.driver.weights.skipped import SkippedUpdateLimit, skipped_in
from slipstream.backend.monitor.metrics import METRICS_FILE, MetricsLog
from slipstream.backend.monitor.progress import Progress
from slipstream.backend.monitor.summary import SUMMARY_FILE, write_end
from slipstream.backend.monitor.trackers.opened import open_trackers
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.model.spec import ModelSpec
from slipstream.configs.installed import untested_notes
from slipstream.configs.schema import RunConfig
from slipstream.configs.supervised import Supervised
from slipstream.rollout.control.ends import GroupCounts
from slipstream.rollout.ledger.lease.folder_lease import FolderLease
from slipstream.rollout.ledger.storage.database import LedgerError
from slipstream.rollout.prompts import (
    EpochOrder,
    Example,
    PromptError,
    answered_chat,
    checked_prompts,
    ends_with_answer,
    read_examples,
    row_word,
)
from slipstream.rollout.system import plugins
from slipstream.rollout.system.disk import describe
from slipstream.rollout.system.lines import read_lines

T = TypeVar("T")

RANK_CLASSES = {
    "responses": "slipstream.backend.trainer.rank.TrainerRank",
    "preferences": "slipstream.backend.trainer.reward_model.RewardModelRank",
}
PROGRESS_LINES = 50
"""Number of progress lines to print."""

METRICS = (
    "train/loss",
    "train/preference",
    "train/grad_norm",
    "train/lr",
    "train/tokens",
    "train/skipped",
    "packing/",
)
"""Beginnings of the tags that mean something without rollouts."""


async def run_supervised(
    supervised: Supervised,
    progress: Progress,
    *,
    resume: bool = False,
    accept_changes: bool = False,
    overwrite: bool = False,
) -> Path:
    """Train, and return the folder of the HF checkpoint. ``resume``: go on with the run in the run folder;
    with ``accept_changes`` also if the content of its inputs has changed. ``overwrite``: delete it instead.
    With neither it is refused.

    Raises InputError before anything is started, Stopped on a signal, and whatever made the run fail.
    """
    config = supervised.run
    stop = Stop(progress, job_end(config, os.environ, time.time()))
    absolute = replace(supervised, run=with_absolute_paths(supervised.run))
    return await stop.run(_run(absolute, progress, stop, resume, accept_changes, overwrite))


async def _run(
    supervised: Supervised,
    progress: Progress,
    stop: Stop,
    resume: bool,
    accept_changes: bool,
    overwrite: bool,
) -> Path:
    named = supervised.run
    config = await with_local_models(named, progress.phase, resume=resume)
    supervised = replace(supervised, run=config)
    await prepare_inputs(config, progress.phase)
    progress.phase("reading model and examples")
    examples = read_encoded_examples(supervised)
    for note in untested_notes(config):
        progress.note(note)
    if (epochs := config.run.epochs) is not None:
        config = in_steps(config, len(examples))
        progress.lasts(config.run.total_steps)
        progress.note(length_note(epochs, len(examples), config.run.total_steps, "examples"))
    for note in examples.notes:
        progress.note(note)
    with permissions(config), ExitStack() as stack:
        lease, checkpoint = await open_folder(config, progress, resume, accept_changes, overwrite)
        stack.enter_context(lease.held(stop.fail))
        folder, position = config.run.folder, RunPosition(0, 0, 0, GroupCounts())
        stack.enter_context(_end_written(folder, position))
        record_commits(named, config)
        progress.keep_in(folder)
        recipe = recipe_text(config)
        metrics = MetricsLog(folder, open_trackers(config, recipe, progress.note), note=progress.note)
        stack.callback(metrics.close)
        progress.phase("starting Ray")
        trajectories = config.rollout.batch_size * supervised.targets
        largest = batch_bytes(trajectories, examples.longest)
        nodes = stack.enter_context(ray_cluster(config, batch_bytes=largest, note=progress.note))
        logs, timeout_s = folder / LOGS, config.run.step_timeout_s
        placement, rank_class = place_trainer(nodes, config), RANK_CLASSES[supervised.learn]
        actors = partial(create_ranks, config, placement, logs, rank_class=rank_class)
        trainer = RankedTrainer(RankGroup(actors, timeout_s=timeout_s, logs=logs), step_timeout_s=timeout_s)
        stack.callback(trainer.kill)
        progress.phase("starting the trainer")
        await trainer.connect()
        ended = asyncio.Event()
        if checkpoint is not None:
            position.version = _unused_version(folder, checkpoint)
            position.step = await trainer.restore(checkpoint.path)
            position.position = position.step * config.rollout.batch_size
            progress.note(f"resumed from step {position.step}")
        metrics.log(position.version, {"run/recipe": f"```yaml\n{recipe}```"})
        checkpoints = TrainerCheckpoints(
            config.checkpoint,
            _checkpoint_folder(config),
            trainer,
            nullcontext,
            NoHistory(epoch=checkpoint.record.epoch + 1 if checkpoint else 0, fence=lease.check),
            _CheckpointNotes(progress, stop),
            last_step=position.step,
        )
        try:
            with stop.by("stopping after this step; again to stop at once", ended.set):
                await _train(config, examples, trainer, position, ended, checkpoints, metrics, progress, stop)
            await checkpoints.last(position)
        finally:
            await checkpoints.cancel()
        if stop.asked:
            raise Stopped
        progress.phase("writing the trained model")
        await trainer.export_hf(folder / CHECKPOINT_HF)
    return folder / CHECKPOINT_HF


@contextmanager
def _end_written(folder: Path, position: RunPosition) -> Iterator[None]:
    """Leave in the run folder how the block has ended."""
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    end: Literal["done", "failed", "stopped"] = "failed"
    try:
        yield
        end = "done"
    except (Stopped, asyncio.CancelledError):
        end = "stopped"
        raise
    finally:
        write_end(folder, end, position.step)


@dataclass(frozen=True)
class _CheckpointNotes:
    """Passes on what checkpoints report."""

    progress: Progress
    stop: Stop

    def checkpoint_taken(self, stall_s: float) -> None:
        """Do nothing: supervised training has no metric for it."""

    def checkpoint_committed(self, step: int, seconds: float) -> None:
        self.stop.checkpoint_done(seconds)
        note_progress(os.environ, step)

    def note(self, text: str) -> None:
        self.progress.note(text)


async def _train(
    config: RunConfig,
    examples: "EncodedExamples",
    trainer: RankedTrainer,
    position: RunPosition,
    ended: asyncio.Event,
    checkpoints: TrainerCheckpoints,
    metrics: MetricsLog,
    progress: Progress,
    stop: Stop,
) -> None:
    skipped = SkippedUpdateLimit(config.run.max_skipped_updates, progress.note)
    steps, size = config.run.total_steps, config.rollout.batch_size
    first = position.step
    while position.step < steps and not ended.is_set():
        began = time.monotonic()
        indices = range(position.position, position.position + size)
        pairs = [pair for index in indices for pair in examples.pairs_at(index)]
        trained = await trainer.learn(demonstrated(pairs, position.version))
        position.version += 1
        position.step += 1
        position.position += size
        shown = {tag: value for tag, value in trained.items() if tag.startswith(METRICS)}
        metrics.log(position.version, {**shown, "train/step": position.step})
        if position.step in (first + 1, steps) or position.step % -(-steps // PROGRESS_LINES) == 0:
            loss = f"{shown['train/loss']:.4f}" if "train/loss" in shown else "not finite"
            progress.phase(f"step {position.step}/{steps}, loss {loss}")
        skipped.add(position.step, await skipped_in(trainer, trained))
        stop.step_done(time.monotonic() - began)
        await checkpoints.step_done(position)


# ---- the run folder


async def open_folder(
    config: RunConfig, progress: Progress, resume: bool, accept_changes: bool, overwrite: bool = False
) -> tuple[FolderLease, FoundCheckpoint | None]:
    """Return the lease of the run folder and the checkpoint to start from.

    Raises InputError when the folder cannot be used.
    """
    folder = config.run.folder
    try:
        resume = goes_on(config, progress, resume=resume)
        if resume and (folder / RECIPE).exists():
            if can_resume(folder):
                raise InputError(f"{folder} holds a run of `slipstream train`, not of `slipstream sft`")
            lease, checkpoint = await _resumed(config, progress, accept_changes)
            if checkpoint is not None:
                return lease, checkpoint
            lease.release()
            progress.note(f"no checkpoint in {folder}: the run starts from the beginning")
        elif resume:
            progress.note(f"nothing to resume in {folder}: the run starts from the beginning")
        return await start_folder(config, progress, treatment(resume=resume, overwrite=overwrite)), None
    except (LedgerError, CheckpointError) as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"cannot use {folder}: {describe(error)}") from error


async def _resumed(
    config: RunConfig, progress: Progress, accept_changes: bool
) -> tuple[FolderLease, FoundCheckpoint | None]:
    lease, inputs, _ = await resume_folder(config, progress, accept_changes=accept_changes)
    with lease.released_on_error():
        progress.phase("checking the last checkpoint")
        checkpoint = _checkpoint_folder(config).latest()
        for warning in checkpoint.warnings if checkpoint else ():
            progress.note(warning)
        if checkpoint is not None:
            write_recipe(config, inputs)
    return lease, checkpoint


def _checkpoint_folder(config: RunConfig) -> CheckpointFolder:
    settings = config.checkpoint
    return CheckpointFolder(
        config.run.folder / CHECKPOINTS, keep_last=settings.keep_last, keep_every=settings.keep_every
    )


def _unused_version(folder: Path, checkpoint: FoundCheckpoint) -> int:
    """Return a number above all that were used, which includes the logged steps after the checkpoint."""
    used = [record["step"] for record in read_lines(folder / METRICS_FILE)]
    return max([checkpoint.record.version, *used]) + 1


# ---- examples


class EncodedExamples:
    """Examples as token ids, in a seeded endless order."""

    def __init__(
        self, config: RunConfig, examples: Sequence[Example], tokenizer: HfTokenizer, notes: Sequence[str]
    ) -> None:
        """``notes``: what the user is told of the model."""
        self.notes = notes
        self._pairs = [_encoded(example, tokenizer) for example in examples]
        assert config.data is not None
        self._order = EpochOrder(len(examples), shuffle=config.data.shuffle, seed=config.run.seed)

    def __len__(self) -> int:
        return len(self._pairs)

    def pairs_at(self, position: int) -> list[tuple[list[int], list[int]]]:
        """Return the prompt with each target of the example at ``position`` in the order."""
        return self._pairs[self._order.at(position)]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt with its target."""
        return max(len(prompt) + len(target) for pairs in self._pairs for prompt, target in pairs)


def read_encoded_examples(supervised: Supervised) -> EncodedExamples:
    """Read tokenizer and examples. Raises InputError with all problems at once."""
    config = supervised.run
    problems: list[str] = []

    def attempt(setting: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (UnsupportedModel, PromptError, plugins.PluginError, OSError, ValueError) as error:
            problems.extend(f"{setting}: {line}" for line in str(error).splitlines())
            return None

    spec = attempt(
        "model.path", lambda: model_spec(config.model.path, plugins.resolved(config.model.families))
    )
    if spec is not None:
        problems += adapter_problems(config, spec)
        problems += reward_model_problems(supervised, spec)
    tokenizer = attempt("model.path", lambda: read_tokenizer(config.model, spec))
    if tokenizer is not None:
        problems += [f"model.path: {reason}" for reason in template_problems(tokenizer)]
    context = spec and spec.geometry.max_positions
    examples = attempt("data.path", lambda: list(checked_examples(supervised, tokenizer, context)))
    if not problems and spec is not None and tokenizer is not None and examples is not None:
        encoded = EncodedExamples(config, examples, tokenizer, [f"model.path: {note}" for note in spec.notes])
        if encoded.longest <= spec.geometry.max_positions:
            return encoded
        problems.append(
            f"data.path: an example has {encoded.longest} tokens; the model has room for "
            f"{spec.geometry.max_positions} (max_position_embeddings): leave such examples out"
        )
    raise InputError("\n".join(problems))


def reward_model_problems(supervised: Supervised, spec: ModelSpec) -> list[str]:
    """Return what keeps a model from becoming a reward model: HF has no type for one that reads images."""
    if supervised.learn == "responses" or not spec.mappings.passed_through:
        return []
    return [
        f"model.path: a {spec.geometry.family} reads more than text, and a reward model of such a model "
        "cannot be written; expected a language model alone"
    ]


def checked_examples(
    supervised: Supervised, tokenizer: HfTokenizer | None, context: int | None
) -> Iterator[Example]:
    """Yield the examples of a recipe. ``context``: tokens that the model has room for; None: not known.

    Raises PromptError with every wrong row, and OSError.
    """
    (file,), columns = supervised.run.training_files, supervised.columns
    if supervised.learn == "responses" and columns.messages is not None:
        checks = [ends_with_answer, *example_checks(tokenizer, context, ())]
        return map(answered_chat, checked_prompts(file, checks))
    targets = (columns.response,) if supervised.learn == "responses" else (columns.chosen, columns.rejected)
    return read_examples(file, targets, example_checks(tokenizer, context, targets))


def _encoded(example: Example, tokenizer: HfTokenizer) -> list[tuple[list[int], list[int]]]:
    """Return the prompt as a rollout sends it, with each target as the chat template writes it."""
    asked, place = example.prompt.messages(), example.prompt
    try:
        return [token_pair(tokenizer, asked, answer_of(text, example.fields)) for text in example.targets]
    except NoTarget as error:
        raise InputError(f"data.path: {place.file}, {row_word(place.file)} {place.line}: {error}") from None
