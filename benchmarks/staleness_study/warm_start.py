"""The study's supervised warm start in plain PyTorch: it teaches a policy the right format and a bad habit.

``slipstream.backend.quickstart.task`` explains the habit.

Shapes: B sequences, T tokens, V symbols; N = B * (T - 1) predictions.
"""

import random
from collections.abc import Sequence

import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from slipstream.backend.quickstart.task import SUMS
from slipstream.backend.quickstart.tokenizer import ASSISTANT, IDS, PAD, demonstration_text
from slipstream.backend.quickstart.warm_start import (
    DECAY_FROM,
    FLOOR_LR,
    PEAK_LR,
    WARMUP_STEPS,
    demonstrations,
)

CHUNKS = 4
"""Number of parts, sorted by length, in which a batch is run: less padding, same gradient."""
IGNORED = -100


def warm_start(
    policy: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    *,
    steps: int,
) -> None:
    """Train the policy in place on noisy demonstrations: cross-entropy of the responses, AdamW."""
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    policy.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * lr_scale(step, steps)
        accumulate_gradient(policy, tokenizer, _texts(rng, progress=step / steps))
        clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    policy.eval()


def lr_scale(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: linear warm-up, flat, linear decay to `FLOOR_LR`."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    decayed = max(0.0, step / steps - DECAY_FROM) / (1.0 - DECAY_FROM)
    return warmup * (1.0 - (1.0 - FLOOR_LR) * decayed)


def _texts(rng: random.Random, progress: float) -> list[str]:
    conversations = demonstrations(rng, progress, SUMS)
    return [demonstration_text(asked["content"], answered["content"]) for asked, answered in conversations]


def response_labels(tokens_BT: torch.Tensor, assistant: int, pad: int) -> torch.Tensor:
    """Return labels [B, T]: the tokens after each row's `assistant` token, and `IGNORED` elsewhere."""
    answering_BT = (tokens_BT == assistant).cumsum(1).bool() & (tokens_BT != assistant)
    return tokens_BT.masked_fill(~answering_BT | (tokens_BT == pad), IGNORED)


def accumulate_gradient(
    policy: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: Sequence[str]
) -> None:
    """Add the gradient of the mean loss per response token of the batch.

    Rows are padded on the right, where the causal mask hides the padding from every token.
    """
    rows = sorted(tokenizer(list(conversations))["input_ids"], key=len)
    assistant, pad = IDS[ASSISTANT], IDS[PAD]
    response_tokens = sum(len(row) - row.index(assistant) - 1 for row in rows)
    size = -(-len(rows) // CHUNKS)
    for chunk in (rows[start : start + size] for start in range(0, len(rows), size)):
        tokens_BT = pad_sequence([torch.tensor(row) for row in chunk], batch_first=True, padding_value=pad)
        labels_BT = response_labels(tokens_BT, assistant, pad)
        logits_BTV = policy(tokens_BT, use_cache=False).logits
        logits_NV, labels_N = logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten()
        loss = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")
        (loss / response_tokens).backward()
