"""The supervised warm start of a small policy, by the trainer that RL uses, on demonstrations of a task.

It runs once, before the job. RL then begins with a policy that has the right format and the faults of its
demonstrations, such as the bad habit of the quickstart's (see `task`), which its samples sometimes break.
"""

import os
import random
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from slipstream.backend.batch.train_batch import demonstrated
from slipstream.backend.cluster.local_ranks import run_ranks
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.quickstart.task import Message, Task, train_problems
from slipstream.backend.quickstart.tokenizer import ASSISTANT, EOS, USER, build_tokenizer
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.supervised import SupervisedConfig
from slipstream.configs.supervised import run_of

BATCH = 64
"""Messages of the assistant in a batch: conversations are drawn until there are as many."""
RANKS = 2
"""Fixed number, so that sums are split in the same way and a seed gives the same policy on every machine."""
PEAK_LR = 5e-3
"""Values from 4e-3 to 1e-2 give the same result."""
WARMUP_STEPS = 30
DECAY_FROM = 0.6
"""Share of the steps after which the learning rate decays."""
FLOOR_LR = 0.05
"""Final learning rate as a share of the peak."""
MICROBATCH_TOKENS = 1024
TIMEOUT_S = 900


def warm_start(start: Path, out: Path, *, seed: int, steps: int, task: Task) -> None:
    """Train the checkpoint at `start`, write it to `out`, which must not exist, and print progress."""
    run_ranks(RANKS, _train, start, out, seed, steps, task, timeout_s=TIMEOUT_S)


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


def _train(rank: RankSpec, start: Path, out: Path, seed: int, steps: int, task: Task) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so small a model is faster without
    from slipstream.backend.trainer.rank import TrainerRank

    tokenizer = build_tokenizer(task.symbols)
    trainer = TrainerRank(recipe(start, seed, steps), rank)
    rng = random.Random(f"warm-start-{seed}")  # the same on every rank
    for step in range(steps):
        conversations = demonstrations(rng, step / steps, task)
        metrics = trainer.train(demonstrated(encoded(tokenizer, conversations), step))
        if metrics is not None and (step % 100 == 0 or step == steps - 1):
            loss = metrics["train/loss"]
            print(f"  warm start: step {step + 1}/{steps}, loss {loss:.3f} per response token", flush=True)
    trainer.export_hf(out)


def demonstrations(rng: random.Random, progress: float, task: Task) -> list[list[Message]]:
    """Draw the conversations of a batch. `progress` goes from 0 to 1.

    Raises ValueError for a demonstration that has nothing to teach.
    """
    conversations, taught = list[list[Message]](), 0
    for problem in train_problems(rng, progress, task.draw):
        messages = task.demonstrate(problem, rng)
        answers = sum(message["role"] == "assistant" for message in messages)
        if not answers:
            raise ValueError(
                f"the demonstration of {problem.prompt!r} has no message of the role `assistant`, which is "
                "what the warm start teaches: expected one or more"
            )
        conversations.append(messages)
        taught += answers
        if taught >= BATCH:
            break
    return conversations


def encoded(
    tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Sequence[Message]]
) -> list[tuple[list[int], list[int]]]:
    """Return, for each message of the assistant, the token ids before it, as RL sends them, and its own ids
    with its end token."""
    texts: list[str] = []
    for messages in conversations:
        before = ""
        for message in messages:
            if message["role"] == "assistant":
                answer = f"{message['content']}{EOS}"
                texts += [f"{before}{ASSISTANT}", answer]
                before += f"{ASSISTANT}{answer}"
            else:
                before += f"{USER}{message['content']}"
    ids = tokenizer(texts)["input_ids"]
    return list(zip(ids[::2], ids[1::2], strict=True))
