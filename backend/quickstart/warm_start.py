"""The quickstart's supervised warm start, by the trainer that RL uses, on noisy demonstrations.

It runs once, before the job. RL then begins with a policy that has the right format and a bad habit (see
`task`), which its samples sometimes break.
"""

import os
import random
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from slipstream.backend.batch.train_batch import demonstrated
from slipstream.backend.cluster.local_ranks import run_ranks
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.quickstart import task
from slipstream.backend.quickstart.tokenizer import build_tokenizer, demonstration_text, prompt_text
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.supervised import SupervisedConfig
from slipstream.configs.supervised import run_of

Demonstrate = Callable[[str, random.Random], tuple[str, str]]
"""Makes the prompt and the response of a demonstration from the prompt of a problem."""

BATCH = 64
RANKS = 2
"""Fixed number, so that sums are split in the same way and a seed gives the same policy on every machine."""
PEAK_LR = 5e-3
"""Values from 4e-3 to 1e-2 give the same result."""
WARMUP_STEPS = 30
DECAY_FROM = 0.6
"""Share of the steps after which the learning rate decays."""
FLOOR_LR = 0.05
"""Final learning rate as a share of the peak."""
CURRICULUM_UNTIL = 0.6
"""Share of the steps over which prompts grow to full length. Without it the policy learns nothing in time."""
MICROBATCH_TOKENS = 1024
TIMEOUT_S = 900


def noisily(prompt: str, rng: random.Random) -> tuple[str, str]:
    """Return the prompt of a problem, and a response with the bad habit."""
    return prompt, task.noisy_demonstration(prompt, rng)


def warm_start(start: Path, out: Path, *, seed: int, steps: int, demonstrate: Demonstrate = noisily) -> None:
    """Train the checkpoint at `start`, write it to `out`, which must not exist, and print progress.

    `demonstrate` must be defined in a module: the processes that train import it.
    """
    run_ranks(RANKS, _train, start, out, seed, steps, demonstrate, timeout_s=TIMEOUT_S)


def recipe(start: Path, seed: int, steps: int) -> RunConfig:
    """Return the trainer's settings."""
    return run_of(
        SupervisedConfig.model_validate(
            {
                "run": {"name": "warm-start", "steps": steps, "seed": seed, "step_timeout_s": TIMEOUT_S},
                "model": {"path": start, "dtype": "float32"},
                "data": {"path": "made-on-the-way.jsonl"},
                "batch_size": BATCH,
                "actor": {
                    "parallel": {"data": RANKS},
                    "microbatch_tokens": MICROBATCH_TOKENS,
                    "optimizer": {
                        "lr": PEAK_LR,
                        "warmup_steps": WARMUP_STEPS,
                        "decay": {
                            "type": "linear",
                            "start": round(DECAY_FROM * steps),
                            "min_lr": FLOOR_LR * PEAK_LR,
                        },
                        "beta2": 0.98,
                        "weight_decay": 0.01,
                    },
                },
            }
        )
    )


def _train(rank: RankSpec, start: Path, out: Path, seed: int, steps: int, demonstrate: Demonstrate) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so small a model is faster without
    from slipstream.backend.trainer.rank import TrainerRank

    tokenizer = build_tokenizer()
    trainer = TrainerRank(recipe(start, seed, steps), rank)
    rng = random.Random(f"warm-start-{seed}")  # the same on every rank
    for step in range(steps):
        pairs = demonstrations(rng, step / steps, demonstrate)
        metrics = trainer.train(demonstrated(encoded(tokenizer, pairs), step))
        if metrics is not None and (step % 100 == 0 or step == steps - 1):
            loss = metrics["train/loss"]
            print(f"  warm start: step {step + 1}/{steps}, loss {loss:.3f} per response token", flush=True)
    trainer.export_hf(out)


def demonstrations(
    rng: random.Random, progress: float, demonstrate: Demonstrate = noisily
) -> list[tuple[str, str]]:
    """Draw a batch of prompts and responses, which get longer as `progress` goes from 0 to 1."""
    grown = min(1.0, progress / CURRICULUM_UNTIL)
    problems = task.train_problems(
        rng,
        mean_extra=1.0 + (task.MEAN_EXTRA_OPERANDS - 1.0) * grown,
        max_operands=round(3 + (task.MAX_OPERANDS - 3) * grown),
    )
    return [demonstrate(problem.prompt, rng) for problem in islice(problems, BATCH)]


def encoded(
    tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]
) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each prompt as RL sends it, and of its response with its end token."""
    before, whole = (
        tokenizer(texts)["input_ids"]
        for texts in (
            [prompt_text(prompt) for prompt, _ in pairs],
            [demonstration_text(prompt, response) for prompt, response in pairs],
        )
    )
    examples = []
    for prompt, both in zip(before, whole, strict=True):
        assert both[: len(prompt)] == prompt
        examples.append((prompt, both[len(prompt) :]))
    return examples
