"""``slipstream sft``: examples -> batches -> the trainer -> a Hugging Face checkpoint.

To the trainer a response is a trajectory with reward 1, as if its present policy had sampled it
(``configs.supervised``). A reward model is trained by ``RewardModelRank`` on pairs of such trajectories.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
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
from backend.stop import Stop
from bridge.families import model_spec
from bridge.hf_config import UnsupportedModel
from configs.schema import RunConfig
from configs.supervised import Supervised
from rollout.data import Example, PromptError, PromptStream, read_examples
from rollout.trajectory import Prompt

RANK_CLASSES = {
    "responses": "backend.trainer.TrainerRank",
    "preferences": "backend.reward_model.RewardModelRank",
}
COLUMNS = {"responses": ("response",), "preferences": ("chosen", "rejected")}

TOLD = 50
"""Steps that are told to the user, of all."""

METRICS = ("train/loss", "train/preference", "train/grad_norm", "train/lr", "train/tokens", "packing/")
"""Those that mean something here, by how they begin."""


async def run_supervised(asked: Supervised, progress: Progress) -> Path:
    """Train as asked; the checkpoint's folder.

    Raises InputError before anything is started, Stopped on a signal, and whatever made the run fail.
    """
    return await Stop(progress).run(_run(replace(asked, run=with_absolute_paths(asked.run)), progress))


async def _run(asked: Supervised, progress: Progress) -> Path:
    config = asked.run
    await prepare_inputs(config, progress.phase)
    progress.phase("reading model and examples")
    examples = read_examples_of(asked)
    with ExitStack() as stack:
        folder = start_folder(config)
        metrics = MetricsLog(folder)
        stack.callback(metrics.close)
        metrics.log(0, {"run/recipe": f"```yaml\n{recipe_text(config)}```"})
        progress.phase("starting Ray")
        nodes = stack.enter_context(ray_cluster(config))
        ranks = create_trainer(
            config, place_trainer(nodes, config), folder / "logs", rank_class=RANK_CLASSES[asked.learn]
        )
        trainer = Trainer(ranks, step_timeout_s=config.run.step_timeout_s, logs=folder / "logs")
        stack.callback(trainer.kill)
        progress.phase("starting the trainer")
        await trainer.connect()
        await _train(config, examples, trainer, metrics, progress.phase)
        progress.phase("writing the trained model")
        await trainer.export_hf(folder / CHECKPOINT)
    return folder / CHECKPOINT


async def _train(
    config: RunConfig,
    examples: "Encoded",
    trainer: Trainer,
    metrics: MetricsLog,
    say: Callable[[str], None],
) -> None:
    steps, size = config.run.steps, config.rollout.batch_size
    for step in range(steps):
        batch = demonstrated([answer for i in range(size) for answer in examples.at(step * size + i)], step)
        result = await trainer.train(batch)
        found = {tag: value for tag, value in result.metrics.items() if tag.startswith(METRICS)}
        metrics.log(result.version, {**found, "train/step": result.version})
        if step == 0 or step + 1 == steps or (step + 1) % -(-steps // TOLD) == 0:
            say(f"step {step + 1}/{steps}, loss {found['train/loss']:.4f}")


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
