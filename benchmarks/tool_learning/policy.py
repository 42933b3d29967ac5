"""The policy: a byte-level Qwen3 of two layers, with a supervised warm start on noisy demonstrations.

The trainer of the warm start is the one that RL uses. A turn of a conversation is one mark and one letter of
its role, so that an episode has about 60 tokens.
"""

import os
import random
from itertools import islice
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from benchmarks.tool_learning.task import Exchange, demonstration, train_prompts
from slipstream.backend.batch.train_batch import demonstrated
from slipstream.backend.cluster.local_ranks import run_ranks
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.quickstart.warm_start import RANKS, TIMEOUT_S, recipe
from tests.chat_model import END, START, build_tokenizer
from tests.chat_model import build_policy as build_small_policy

TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ '{START}' + message.role[0] + message.content }}}}"
    f"{{% if message.role == 'assistant' %}}{END}{{% endif %}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{START}a{{% endif %}}"
)

WARM_START_STEPS = 160
"""100 steps can be enough; the others make the result steady over seeds."""
CONVERSATIONS = 24
"""Demonstrations of one step of the warm start, of three turns each."""


def write_policy(folder: Path, seed: int, steps: int = WARM_START_STEPS) -> None:
    """Write policy and tokenizer as a Hugging Face checkpoint, after a warm start of `steps`."""
    tokenizer = build_tokenizer(TEMPLATE)
    untrained = folder.with_name(f"{folder.name}-untrained")
    build_policy(tokenizer, seed).save_pretrained(untrained)
    tokenizer.save_pretrained(untrained)
    run_ranks(RANKS, _train, untrained, folder, seed, steps, timeout_s=TIMEOUT_S)


def build_policy(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Return a policy with random float32 weights."""
    small = build_small_policy(tokenizer)
    config = small.config
    config.hidden_size, config.intermediate_size = 128, 256
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 32
    config.max_position_embeddings = 512
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Qwen3ForCausalLM(config)
    policy.generation_config = small.generation_config
    return policy


def _train(rank: RankSpec, start: Path, out: Path, seed: int, steps: int) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so small a model is faster without
    from slipstream.backend.trainer.rank import TrainerRank

    tokenizer = build_tokenizer(TEMPLATE)
    trainer = TrainerRank(recipe(start, seed, steps), rank)
    rng = random.Random(f"warm-start-{seed}")  # the same on every rank
    for step in range(steps):
        prompts = islice(train_prompts(rng), CONVERSATIONS)
        turns = [
            turn for prompt in prompts for turn in encoded(tokenizer, prompt, demonstration(prompt, rng))
        ]
        metrics = trainer.train(demonstrated(turns, step))
        if metrics is not None and (step % 100 == 0 or step == steps - 1):
            loss = metrics["train/loss"]
            print(f"  warm start: step {step + 1}/{steps}, loss {loss:.3f} per sampled token", flush=True)
    trainer.export_hf(out)


def encoded(
    tokenizer: PreTrainedTokenizerFast, prompt: str, exchanges: list[Exchange]
) -> list[tuple[list[int], list[int]]]:
    """Return of each turn the token ids of the conversation before it, and those of its answer."""
    text, turns = f"{START}u{prompt}{START}a", list[tuple[list[int], list[int]]]()
    for exchange in exchanges:
        answer = f"{exchange.answer}{END}"
        turns.append((tokenizer.encode(text), tokenizer.encode(answer)))
        text += f"{answer}{START}t{exchange.result}{START}a"
    return turns
