"""The quickstart's policy: a Qwen3 of two layers and its supervised warm start.

Plain PyTorch and transformers: this runs once, before the job, so that RL begins with a policy that has the
right format, a bad habit (see `task`), and samples that sometimes break it.

Shapes: B sequences, T tokens, V symbols; N = B * (T - 1) predictions.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from backend.quickstart import task
from backend.quickstart.tokenizer import ASSISTANT, demonstration_text, prompt_text

BATCH = 64
CHUNKS = 4
"""A batch is sorted by length and run in this many pieces: less padding, same gradient."""
PEAK_LR = 5e-3
"""Between 4e-3 and 1e-2 the outcome is the same."""
WARMUP_STEPS = 30
DECAY_FROM = 0.6
FLOOR_LR = 0.05
"""Learning rate at the last step, as a share of the peak."""
CURRICULUM_UNTIL = 0.6
"""Share of the steps over which prompts grow to full length; without it nothing is learnt in time."""
INITIALIZER_RANGE = 0.1
"""About 1/sqrt(hidden). At the usual 0.02 so narrow a model is still on its plateau after the warm start."""
THREADS = 2
"""The same on every machine, so that sums are split in the same way and a seed gives the same policy."""

IGNORED = -100
MAX_RESPONSE_TOKENS = 3 * task.MAX_OPERANDS + 3


def build_policy(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A policy with random float32 weights and a generation config that stops at the end token."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Qwen3ForCausalLM(config)
    policy.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return policy


def warm_start(
    policy: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    *,
    steps: int,
    say: Callable[[str], None],
) -> None:
    """Teaches the task from noisy demonstrations, in place: response-only cross-entropy, AdamW."""
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    policy.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * lr_scale(step, steps)
        loss = accumulate_gradient(policy, tokenizer, demonstrations(rng, progress=step / steps))
        clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            say(f"  warm start: step {step + 1}/{steps}, loss {loss:.3f} per response token")
    policy.eval()


def lr_scale(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up, flat, then linear decay to `FLOOR_LR`."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    decayed = max(0.0, step / steps - DECAY_FROM) / (1.0 - DECAY_FROM)
    return warmup * (1.0 - (1.0 - FLOOR_LR) * decayed)


def demonstrations(rng: random.Random, progress: float) -> list[str]:
    """One batch of noisy single-turn conversations, longer as `progress` goes from 0 to 1."""
    grown = min(1.0, progress / CURRICULUM_UNTIL)
    problems = task.train_problems(
        rng,
        mean_extra=1.0 + (task.MEAN_EXTRA_OPERANDS - 1.0) * grown,
        max_operands=round(3 + (task.MAX_OPERANDS - 3) * grown),
    )
    return [
        demonstration_text(problem.prompt, task.noisy_demonstration(problem.prompt, rng))
        for problem in islice(problems, BATCH)
    ]


def response_labels(tokens_BT: torch.Tensor, assistant: int, pad: int) -> torch.Tensor:
    """labels_BT: the tokens after each row's `assistant` token, `IGNORED` up to it and in the padding."""
    answering_BT = (tokens_BT == assistant).cumsum(1).bool() & (tokens_BT != assistant)
    return tokens_BT.masked_fill(~answering_BT | (tokens_BT == pad), IGNORED)


@torch.no_grad()
def greedy_accuracy(
    policy: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[task.Problem]
) -> float:
    """Share of `problems` that the policy's most likely response answers; a response must end by itself."""
    texts = [prompt_text(problem.prompt) for problem in problems]
    prompts = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    tokens_BT = policy.generate(**prompts, do_sample=False, max_new_tokens=MAX_RESPONSE_TOKENS)
    responses = tokens_BT[:, prompts["input_ids"].shape[1] :].tolist()
    right = sum(
        _is_right(tokenizer, response, problem.label)
        for response, problem in zip(responses, problems, strict=True)
    )
    return right / len(problems)


@contextmanager
def fixed_threads() -> Iterator[None]:
    """Runs the block on `THREADS` CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def accumulate_gradient(
    policy: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: Sequence[str]
) -> float:
    """Adds the gradient of the mean loss per response token of the whole batch, and returns that loss.

    Rows are padded on the right, so the causal mask alone keeps padding out of every token's sight.
    """
    rows = sorted(tokenizer(list(conversations))["input_ids"], key=len)
    assistant, pad = tokenizer.convert_tokens_to_ids(ASSISTANT), tokenizer.pad_token_id
    response_tokens = sum(len(row) - row.index(assistant) - 1 for row in rows)
    size = -(-len(rows) // CHUNKS)
    total = 0.0
    for chunk in (rows[start : start + size] for start in range(0, len(rows), size)):
        tokens_BT = pad_sequence([torch.tensor(row) for row in chunk], batch_first=True, padding_value=pad)
        labels_BT = response_labels(tokens_BT, assistant, pad)
        logits_BTV = policy(tokens_BT, use_cache=False).logits
        logits_NV, labels_N = logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten()
        loss = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")
        (loss / response_tokens).backward()
        total += loss.item()
    return total / response_tokens


def _is_right(tokenizer: PreTrainedTokenizerFast, response: list[int], label: str) -> bool:
    if tokenizer.eos_token_id not in response:
        return False
    return task.is_correct(tokenizer.decode(response[: response.index(tokenizer.eos_token_id)]), label)
