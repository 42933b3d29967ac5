"""A byte-level policy that reads ChatML with tools, for tests: any text, 8k tokens, a few thousand weights.

A token is a byte, so that the tests can cut characters and stop strings wherever they like. Random weights
speak no language; where a test needs an answer, a scripted source gives it.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CONTEXT = 8192
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of their own that are text: they are never skipped."""

_SYSTEM = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nCall: <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_MESSAGES = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
THINKING
{{- message.content.lstrip('\\n') if message.reasoning_content else message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) }}
{{- ', "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_KEPT = """\
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
"""
_REMOVED = """\
{%- if message.reasoning_content and loop.last %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
"""
APPENDING = _SYSTEM + _MESSAGES.replace("THINKING\n", _KEPT)
"""The ids of a conversation begin with those of every earlier prompt of it."""
REWRITING = _SYSTEM + _MESSAGES.replace("THINKING\n", _REMOVED)
"""Reasoning vanishes from all answers but the last, as with many reasoning models."""


def build_tokenizer(template: str = APPENDING) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 bytes and the marks of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD, START, END])
    backend.add_tokens(list(WORDS))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def build_policy(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen3ForCausalLM:
    """Return a policy of two layers with random float32 weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Qwen3ForCausalLM(config)
    policy.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return policy


def write_chat_model(folder: Path, template: str = APPENDING, *, weights: bool = True) -> Path:
    """Write the policy and its tokenizer as a Hugging Face checkpoint; without weights, all but those."""
    tokenizer = build_tokenizer(template)
    policy = build_policy(tokenizer)
    if weights:
        policy.save_pretrained(folder)
    else:
        policy.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
