"""``slipstream sft``: demonstrations -> batches -> the trainer -> a Hugging Face checkpoint.

To the trainer a demonstration is a trajectory with reward 1, as if its present policy had sampled it
(``configs.supervised``).
"""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from backend.batching import demonstrated
from backend.cluster import create_trainer, ray_cluster
from backend.inputs import InputError, read_tokenizer
from backend.monitor.metrics import MetricsLog
from backend.monitor.progress import Progress
from backend.placement import place_trainer
from backend.prepare import prepare_inputs
from backend.remote import Trainer
from backend.run import CHECKPOINT, recipe_text, start_folder, with_absolute_paths
from backend.stop import Stop, Stopped
from bridge.families import model_spec
from bridge.hf_config import UnsupportedModel
from configs.schema import RunConfig
from rollout.data import Demonstration, PromptError, PromptStream, read_demonstrations

TOLD = 50
"""Steps that are told to the user, of all."""

METRICS = ("train/loss", "train/entropy", "train/grad_norm", "train/lr", "train/tokens", "packing/")
"""Those that mean something here, by how they begin."""


async def run_supervised(config: RunConfig, progress: Progress) -> Path:
    """Train as ``configs.load.load_supervised`` says; the checkpoint's folder.

    Raises InputError before anything is started, Stopped on a signal, and whatever made the run fail.
    """
    stop = Stop(progress)
    task = asyncio.ensure_future(_run(with_absolute_paths(config), progress))
    with stop.on_signals(), stop.by("stopping", task.cancel):
        try:
            return await task
        except asyncio.CancelledError:
            if stop.asked:
                raise Stopped from None
            raise


async def _run(config: RunConfig, progress: Progress) -> Path:
    await prepare_inputs(config, progress.phase)
    progress.phase("reading model and demonstrations")
    pairs = read_pairs(config)
    with ExitStack() as stack:
        folder = start_folder(config)
        metrics = MetricsLog(folder)
        stack.callback(metrics.close)
        metrics.log(0, {"run/recipe": f"```yaml\n{recipe_text(config)}```"})
        progress.phase("starting Ray")
        nodes = stack.enter_context(ray_cluster(config))
        ranks = create_trainer(config, place_trainer(nodes, config), folder / "logs")
        trainer = Trainer(ranks, step_timeout_s=config.run.step_timeout_s, logs=folder / "logs")
        stack.callback(trainer.kill)
        progress.phase("starting the trainer")
        await trainer.connect()
        await _train(config, pairs, trainer, metrics, progress.phase)
        progress.phase("writing the trained model")
        await trainer.export_hf(folder / CHECKPOINT)
    return folder / CHECKPOINT


async def _train(
    config: RunConfig,
    pairs: "Pairs",
    trainer: Trainer,
    metrics: MetricsLog,
    say: Callable[[str], None],
) -> None:
    steps, size = config.run.steps, config.rollout.batch_size
    for step in range(steps):
        batch = demonstrated([pairs.at(step * size + i) for i in range(size)], step)
        result = await trainer.train(batch)
        found = {tag: value for tag, value in result.metrics.items() if tag.startswith(METRICS)}
        metrics.log(result.version, {**found, "train/step": result.version})
        if step == 0 or step + 1 == steps or (step + 1) % -(-steps // TOLD) == 0:
            say(f"step {step + 1}/{steps}, loss {found['train/loss']:.4f} per token")


class Pairs:
    """Demonstrations as token ids, in a seeded endless order."""

    def __init__(self, config: RunConfig, demonstrations: list[Demonstration], tokenizer: Any) -> None:
        self._pairs = [_encoded(one, tokenizer) for one in demonstrations]
        prompts = [one.prompt for one in demonstrations]
        self._order = PromptStream(prompts, shuffle=config.data.shuffle, seed=config.run.seed)

    def at(self, position: int) -> tuple[list[int], list[int]]:
        return self._pairs[self._order.at(position).id]

    @property
    def longest(self) -> int:
        return max(len(prompt) + len(response) for prompt, response in self._pairs)


def read_pairs(config: RunConfig) -> Pairs:
    """Raises InputError with all problems at once."""
    problems: list[str] = []

    def attempt(setting: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (UnsupportedModel, PromptError, OSError, ValueError) as error:
            problems.append(f"{setting}: {error}")

    spec = attempt("model.path", lambda: model_spec(config.model.path))
    tokenizer = attempt("model.path", lambda: read_tokenizer(config, spec))
    demonstrations = attempt("data.path", lambda: read_demonstrations(config.data.path))
    if not problems:
        pairs = Pairs(config, demonstrations, tokenizer)
        if pairs.longest <= spec.geometry.max_positions:
            return pairs
        problems.append(
            f"data.path: a demonstration has {pairs.longest} tokens; the model has room for "
            f"{spec.geometry.max_positions} (max_position_embeddings): leave such ones out"
        )
    raise InputError("\n".join(problems))


def _encoded(one: Demonstration, tokenizer: Any) -> tuple[list[int], list[int]]:
    """The prompt as a rollout sends it, and the response with the end token that a policy has to give."""
    prompt = tokenizer.apply_chat_template(
        one.prompt.messages(), add_generation_prompt=True, return_dict=False
    )
    response = tokenizer.encode(one.response, add_special_tokens=False)
    return prompt, [*response, tokenizer.eos_token_id]
