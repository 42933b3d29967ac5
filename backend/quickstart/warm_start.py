"""The quickstart's supervised warm start: the trainer that RL will use, on noisy demonstrations.

It runs once, before the job, so that RL begins with a policy that has the right format, a bad habit (see
`task`), and samples that sometimes break it.
"""

import os
import random
from itertools import islice
from pathlib import Path

from slipstream.backend.batch.train_batch import demonstrated
from slipstream.backend.cluster.local_ranks import run_ranks
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.quickstart import task
from slipstream.backend.quickstart.tokenizer import build_tokenizer, demonstration_text, prompt_text
from slipstream.configs.schema import RunConfig
from slipstream.configs.supervised import run_of

BATCH = 64
RANKS = 2
"""The same on every machine, so that sums are split in the same way and a seed gives the same policy."""
PEAK_LR = 5e-3
"""Between 4e-3 and 1e-2 the outcome is the same."""
WARMUP_STEPS = 30
DECAY_FROM = 0.6
"""Share of the steps after which the learning rate falls."""
FLOOR_LR = 0.05
"""Learning rate at the end, as a share of the peak."""
CURRICULUM_UNTIL = 0.6
"""Share of the steps over which prompts grow to full length; without it nothing is learnt in time."""
MICROBATCH_TOKENS = 1024
TIMEOUT_S = 900


def warm_start(start: Path, out: Path, *, seed: int, steps: int) -> None:
    """Train the checkpoint at `start` into one at `out`, which does not exist yet. Prints its progress."""
    run_ranks(RANKS, _train, start, out, seed, steps, timeout_s=TIMEOUT_S)


def recipe(start: Path, seed: int, steps: int) -> RunConfig:
    """What the trainer is told."""
    return RunConfig.model_validate(
        run_of(
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


def _train(rank: RankSpec, start: Path, out: Path, seed: int, steps: int) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so small a model is faster without
    from slipstream.backend.trainer.rank import TrainerRank

    tokenizer = build_tokenizer()
    trainer = TrainerRank(recipe(start, seed, steps), rank)
    rng = random.Random(f"warm-start-{seed}")  # every rank draws the same
    for step in range(steps):
        shown = demonstrations(rng, progress=step / steps)
        metrics = trainer.train(demonstrated([encoded(tokenizer, *one) for one in shown], step))
        if metrics is not None and (step % 100 == 0 or step == steps - 1):
            loss = metrics["train/loss"]
            print(f"  warm start: step {step + 1}/{steps}, loss {loss:.3f} per response token", flush=True)
    trainer.export_hf(out)


def demonstrations(rng: random.Random, progress: float) -> list[tuple[str, str]]:
    """One batch of prompts and noisy responses, longer as `progress` goes from 0 to 1."""
    grown = min(1.0, progress / CURRICULUM_UNTIL)
    problems = task.train_problems(
        rng,
        mean_extra=1.0 + (task.MEAN_EXTRA_OPERANDS - 1.0) * grown,
        max_operands=round(3 + (task.MAX_OPERANDS - 3) * grown),
    )
    return [
        (problem.prompt, task.noisy_demonstration(problem.prompt, rng)) for problem in islice(problems, BATCH)
    ]


def encoded(tokenizer, prompt: str, response: str) -> tuple[list[int], list[int]]:
    """Token ids of the prompt as RL sends it, and of the response with its end."""
    before, whole = (
        tokenizer(text)["input_ids"] for text in (prompt_text(prompt), demonstration_text(prompt, response))
    )
    assert whole[: len(before)] == before
    return before, whole[len(before) :]
