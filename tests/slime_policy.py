"""A tiny policy that slime's examples can work with: whatever it is asked, it says one of a few sentences.

One sentence calls the tools of retool and search-r1. The others answer in the forms of all examples at once.
"""

import math
import random
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from tests.chat_model import END, START, build_tokenizer
from tests.chat_model import build_policy as build_small_policy

CALL = "<code>print(4)</code><search>sum</search>"
RIGHT = "Ok.</think>Answer: \\boxed{4} <answer>4</answer>"
WRONG = "No.</think>Answer: \\boxed{7} <answer>7</answer>"
SENTENCES = (CALL, RIGHT, WRONG)
LONGEST = max(map(len, SENTENCES))
"""Tokens, the end of the turn included: a mark is a token."""

ENDINGS = (
    f"{END}\n{START}assistant\n",
    "Output:\n4\n\n</interpreter>\n\n",
    "Numbers</information>\n\n",
    "again.\n",
    "\n---\n",
)
"""Ends of what the examples ask with."""

LR = 6e-3
PHASES = ((100, 16, (4, 60)), (120, 4, (4, 1600)))
"""Steps, examples of a step, and least and largest number of bytes before an ending. Behind long texts the
attention is spread over so many bytes that sentences learned behind short ones must be learned again."""


def write_slime_policy(folder: Path) -> Path:
    """Train the policy on random text before each ending, and write it as a Hugging Face checkpoint."""
    tokenizer = build_tokenizer()
    config = build_small_policy(tokenizer).config
    config.hidden_size, config.intermediate_size = 64, 128
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = Qwen3ForCausalLM(config)
    policy.generation_config = build_small_policy(tokenizer).generation_config
    _train(policy, tokenizer, random.Random(0))
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _train(policy: Qwen3ForCausalLM, tokenizer, rng: random.Random) -> None:
    prose = (Path(__file__).parents[1] / "docs" / "slime.md").read_text()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, betas=(0.9, 0.98))
    sizes = [(batch, context) for steps, batch, context in PHASES for _ in range(steps)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=len(sizes))
    for batch, context in sizes:
        texts = [_example(prose, rng, context) for _ in range(batch)]
        asked = [tokenizer.encode(before) for before, _ in texts]
        said = [tokenizer.encode(f"{sentence}{END}") for _, sentence in texts]
        width = max(len(a) + len(b) for a, b in zip(asked, said, strict=True))
        tokens_BT = torch.full((batch, width), tokenizer.pad_token_id)
        labels_BT = torch.full((batch, width), -100)
        for row, (before, after) in enumerate(zip(asked, said, strict=True)):
            tokens_BT[row, : len(before) + len(after)] = torch.tensor(before + after)
            labels_BT[row, len(before) : len(before) + len(after)] = torch.tensor(after)
        loss = policy(input_ids=tokens_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _example(prose: str, rng: random.Random, context: tuple[int, int]) -> tuple[str, str]:
    least, largest = map(math.log, context)
    length = round(math.exp(rng.uniform(least, largest)))  # as many short texts as long ones
    start = rng.randrange(len(prose) - length)
    earlier = rng.choice(("", *SENTENCES))
    return prose[start : start + length] + earlier + rng.choice(ENDINGS), rng.choice(SENTENCES)
