"""A policy with random weights that writes printable ASCII and ends some of its answers.

Text of such tokens says exactly which tokens they are, so that a lost or repeated one shows in what a user
reads. Two layers and a few thousand weights cost an engine little, so that many answers run at a time.
"""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tests.chat_model import END, build_policy, build_tokenizer

PRINTABLE = [chr(code) for code in range(0x20, 0x7F)]

LAYERS, HEAD = 0.15, 0.3
"""Standard deviations of the weights of the layers and of the LM head."""

COMMON = 4.0
"""What all embeddings, and so all hidden states, have in common, beside parts of standard deviation 1."""

NEVER, SELDOM = -16.0, 0.15
"""Weights of that common part for tokens that must not come, and for the end of an answer."""


def write_policy(folder: Path, seed: int = 0) -> PreTrainedTokenizerFast:
    """Write a Hugging Face checkpoint, and return its tokenizer."""
    tokenizer = build_tokenizer()
    config = build_policy(tokenizer).config
    config.tie_word_embeddings = False
    config.initializer_range = LAYERS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Qwen3ForCausalLM(config)
        embeddings = torch.randn(config.vocab_size, config.hidden_size)
        head = HEAD * torch.randn(config.vocab_size, config.hidden_size)
    embeddings[:, 0] = COMMON
    head[:, 0] = NEVER
    head[tokenizer.convert_tokens_to_ids([tokenizer.tokenize(each)[0] for each in PRINTABLE]), 0] = 0.0
    end = tokenizer.convert_tokens_to_ids(END)
    head[end], head[end, 0] = 0.0, SELDOM
    with torch.no_grad():
        policy.model.embed_tokens.weight.copy_(embeddings)
        policy.lm_head.weight.copy_(head)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer
