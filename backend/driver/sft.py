"""``slipstream sft``: examples -> batches -> the trainer -> a Hugging Face checkpoint.

To the trainer a response is a trajectory with reward 1, as if its present policy had sampled it
(``configs.supervised``). A reward model is trained by ``RewardModelRank`` on pairs of such trajectories.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.backend.batch.train_batch import demonstrated
from slipstream.backend.checkpoint.errors import CheckpointError, describe
from slipstream.backend.checkpoint.folder import CHECKPOINTS, CheckpointFolder, FoundCheckpoint
from slipstream.backend.cluster.placement import place_trainer
from slipstream.backend.cluster.ray_cluster import create_trainer, ray_cluster
from slipstream.backend.driver.checkpointing import NoHistory, TrainerCheckpoints
from slipstream.backend.driver.folder_lock import locked
from slipstream.backend.driver.inputs import InputError, read_tokenizer
from slipstream.backend.driver.prepare import prepare_inputs
from slipstream.backend.driver.resume import can_resume, check_same_run
from slipstream.backend.driver.run import CHECKPOINT, recipe_text, start_folder, with_absolute_paths
from slipstream.backend.driver.stop import Stop, Stopped
from slipstream.backend.driver.trainer_client import Trainer
from slipstream.backend.monitor.metrics import METRICS_FILE, MetricsLog
from slipstream.backend.monitor.progress import Progress
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf_config import UnsupportedModel
from slipstream.configs.schema import RunConfig
from slipstream.configs.supervised import Supervised
from slipstream.rollout.control.core import GroupCounts
from slipstream.rollout.ledger.database import LedgerError
from slipstream.rollout.prompts import Example, PromptError, PromptStream, read_examples
from slipstream.rollout.trajectory import Prompt

RANK_CLASSES = {
    "responses": "slipstream.backend.trainer.rank.TrainerRank",
    "preferences": "slipstream.backend.trainer.reward_model.RewardModelRank",
}
COLUMNS = {"responses": ("response",), "preferences": ("chosen", "rejected")}

TOLD = 50
"""Steps that are told to the user, of all."""

METRICS = ("train/loss", "train/preference", "train/grad_norm", "train/lr", "train/tokens", "packing/")
"""Those that mean something here, by how they begin."""


async def run_supervised(asked: Supervised, progress: Progress, *, resume: bool = False) -> Path:
    """Train as asked; the checkpoint's folder. ``resume``: go on with the run of this name, if there is one.

    Raises InputError before anything is started, Stopped on a signal, and whatever made the run fail.
    """
    stop = Stop(progress)
    return await stop.run(_run(replace(asked, run=with_absolute_paths(asked.run)), progress, stop, resume))


async def _run(asked: Supervised, progress: Progress, stop: Stop, resume: bool) -> Path:
    config = asked.run
    await prepare_inputs(config, progress.phase)
    progress.phase("reading model and examples")
    examples = read_examples_of(asked)
    with ExitStack() as stack:
        folder, found = open_folder(config, stack, progress, resume)
        metrics = MetricsLog(folder)
        stack.callback(metrics.close)
        progress.phase("starting Ray")
        nodes = stack.enter_context(ray_cluster(config))
        ranks = create_trainer(
            config, place_trainer(nodes, config), folder / "logs", rank_class=RANK_CLASSES[asked.learn]
        )
        trainer = Trainer(ranks, step_timeout_s=config.run.step_timeout_s, logs=folder / "logs")
        stack.callback(trainer.kill)
        progress.phase("starting the trainer")
        await trainer.connect()
        at = Position(config.rollout.batch_size)
        if found is not None:
            at.version = _unused_version(folder, found)
            at.step = await trainer.restore(found.path)
            progress.note(f"resumed from step {at.step}")
        metrics.log(at.version, {"run/recipe": f"```yaml\n{recipe_text(config)}```"})
        checkpoints = TrainerCheckpoints(
            config.checkpoint,
            _checkpoint_folder(config),
            trainer,
            trainer.begin_checkpoint,
            NoHistory(epoch=found.record.epoch + 1 if found else 0),
            _Told(progress),
            last_step=at.step,
        )
        try:
            with stop.by("stopping behind this step; again to stop at once", at.end):
                await _train(config, examples, trainer, at, checkpoints, metrics, progress.phase)
            await checkpoints.last(at)
        finally:
            await checkpoints.cancel()
        if stop.asked:
            raise Stopped
        progress.phase("writing the trained model")
        await trainer.export_hf(folder / CHECKPOINT)
    return folder / CHECKPOINT


@dataclass
class Position:
    """Where a supervised run stands. To its checkpoints it is a run without groups."""

    batch_size: int
    version: int = 0
    step: int = 0
    ended: bool = False
    counts = GroupCounts()

    @property
    def position(self) -> int:
        return self.step * self.batch_size

    def end(self) -> None:
        """No further step."""
        self.ended = True


@dataclass(frozen=True)
class _Told:
    """What checkpoints have to say."""

    progress: Progress

    def checkpoint_taken(self, stall_s: float) -> None:
        """Nobody waits for this trainer."""

    def note(self, text: str) -> None:
        self.progress.note(text)


async def _train(
    config: RunConfig,
    examples: "Encoded",
    trainer: Trainer,
    at: Position,
    checkpoints: TrainerCheckpoints,
    metrics: MetricsLog,
    say: Callable[[str], None],
) -> None:
    steps, size = config.run.steps, config.rollout.batch_size
    first = at.step
    while at.step < steps and not at.ended:
        answers = [answer for i in range(size) for answer in examples.at(at.position + i)]
        trained = await trainer.train(demonstrated(answers, at.version))
        at.version, at.step = at.version + 1, at.step + 1
        found = {tag: value for tag, value in trained.items() if tag.startswith(METRICS)}
        metrics.log(at.version, {**found, "train/step": at.step})
        if at.step in (first + 1, steps) or at.step % -(-steps // TOLD) == 0:
            say(f"step {at.step}/{steps}, loss {found['train/loss']:.4f}")
        await checkpoints.step_done(at)


# ---- the run folder


def open_folder(
    config: RunConfig, stack: ExitStack, progress: Progress, resume: bool
) -> tuple[Path, FoundCheckpoint | None]:
    """The run folder, locked as long as ``stack`` lasts; and the checkpoint to go on from.

    Raises InputError when the folder cannot be used.
    """
    folder = config.run.folder
    try:
        if resume and (folder / "recipe.yaml").exists():
            if can_resume(folder):
                raise InputError(f"{folder} holds a run of `slipstream train`, not of `slipstream sft`")
            stack.enter_context(locked(folder))
            check_same_run(config)
            progress.phase("checking the last checkpoint")
            found = _checkpoint_folder(config).latest()
            for warning in found.warnings if found else ():
                progress.note(warning)
            if found is not None:
                (folder / "recipe.yaml").write_text(recipe_text(config))
                return folder, found
            progress.note(f"no checkpoint in {folder}: the run starts from the beginning")
            stack.close()
        elif resume:
            progress.note(f"nothing to resume in {folder}: the run starts from the beginning")
        start_folder(config)
        stack.enter_context(locked(folder))
        return folder, None
    except (LedgerError, CheckpointError) as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"cannot use {folder}: {describe(error)}") from error


def _checkpoint_folder(config: RunConfig) -> CheckpointFolder:
    settings = config.checkpoint
    return CheckpointFolder(
        config.run.folder / CHECKPOINTS, keep_last=settings.keep_last, keep_every=settings.keep_every
    )


def _unused_version(folder: Path, found: FoundCheckpoint) -> int:
    """Above every number that the run has used: steps behind the checkpoint were logged under theirs."""
    used = [json.loads(line)["step"] for line in (folder / METRICS_FILE).read_text().splitlines()]
    return max([found.record.version, *used]) + 1


# ---- examples


class Encoded:
    """Examples as token ids, in a seeded endless order."""

    def __init__(self, config: RunConfig, examples: list[Example], tokenizer: Any) -> None:
        self._answers = [
            [_encoded(one.prompt, answer, tokenizer) for answer in one.answers] for one in examples
        ]
        prompts = [one.prompt for one in examples]
        self._order = PromptStream(prompts, shuffle=config.data.shuffle, seed=config.run.seed)

    def at(self, position: int) -> list[tuple[list[int], list[int]]]:
        """Prompt and answer for each answer of the example."""
        return self._answers[self._order.at(position).id]

    @property
    def longest(self) -> int:
        return max(len(prompt) + len(answer) for answers in self._answers for prompt, answer in answers)


def read_examples_of(asked: Supervised) -> Encoded:
    """Raises InputError with all problems at once."""
    config, problems = asked.run, []

    def attempt(setting: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (UnsupportedModel, PromptError, OSError, ValueError) as error:
            problems.append(f"{setting}: {error}")

    spec = attempt("model.path", lambda: model_spec(config.model.path))
    tokenizer = attempt("model.path", lambda: read_tokenizer(config, spec))
    examples = attempt("data.path", lambda: read_examples(config.data.path, COLUMNS[asked.learn]))
    if not problems:
        encoded = Encoded(config, examples, tokenizer)
        if encoded.longest <= spec.geometry.max_positions:
            return encoded
        problems.append(
            f"data.path: an example has {encoded.longest} tokens; the model has room for "
            f"{spec.geometry.max_positions} (max_position_embeddings): leave such ones out"
        )
    raise InputError("\n".join(problems))


def _encoded(prompt: Prompt, answer: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """The prompt as a rollout sends it, and the answer with the end token that a policy has to give."""
    asked = tokenizer.apply_chat_template(prompt.messages(), add_generation_prompt=True, return_dict=False)
    return asked, [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
