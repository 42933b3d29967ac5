"""A small policy: a Qwen3 of two layers with random weights; and the accuracy of the quickstart's."""

from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from slipstream.backend.quickstart import HIDDEN, task
from slipstream.backend.quickstart.tokenizer import EOS, IDS, PAD, prompt_text

INITIALIZER_RANGE = 0.1
"""About 1/sqrt(``HIDDEN``). With 0.02, as usual, so narrow a model is still on its plateau then."""
HEADS = 4

MAX_RESPONSE_TOKENS = 3 * task.MAX_OPERANDS + 3


def build_policy(tokenizer: PreTrainedTokenizerFast, seed: int, hidden: int = HIDDEN) -> Qwen3ForCausalLM:
    """Return a policy with random float32 weights and a generation config that stops at the end token.

    Raises ValueError unless the heads can share ``hidden`` in even parts, as rotary embeddings need them.
    """
    if hidden <= 0 or hidden % (2 * HEADS):
        raise ValueError(f"hidden is {hidden}; expected a positive multiple of {2 * HEADS}")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=hidden // HEADS,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE * (HIDDEN / hidden) ** 0.5,
        bos_token_id=None,
        eos_token_id=IDS[EOS],
        pad_token_id=IDS[PAD],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Qwen3ForCausalLM(config)
    policy.generation_config = GenerationConfig(eos_token_id=IDS[EOS], pad_token_id=IDS[PAD])
    return policy


@torch.no_grad()
def greedy_accuracy(
    policy: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[task.Problem]
) -> float:
    """Return the share of `problems` that greedy responses answer. A response must end by itself to count."""
    texts = [prompt_text(problem.prompt) for problem in problems]
    prompts = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    # transformers types `self` of `generate` with attributes that no model declares.
    tokens_BT = policy.generate(  # pyright: ignore[reportAttributeAccessIssue]
        **prompts, do_sample=False, max_new_tokens=MAX_RESPONSE_TOKENS
    )
    responses = tokens_BT[:, prompts["input_ids"].shape[1] :].tolist()
    right = sum(
        _is_right(tokenizer, response, problem.label)
        for response, problem in zip(responses, problems, strict=True)
    )
    return right / len(problems)


def _is_right(tokenizer: PreTrainedTokenizerFast, response: list[int], label: str) -> bool:
    if IDS[EOS] not in response:
        return False
    return task.is_correct(str(tokenizer.decode(response[: response.index(IDS[EOS])])), label)
