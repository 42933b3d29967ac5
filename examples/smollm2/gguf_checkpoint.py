"""A Llama in GGUF, the file format of llama.cpp, as a Hugging Face checkpoint directory.

transformers reads GGUF too, with accelerate. Its weights are the same, but its tokenizer names the token that
begins a message as the end token, and joins blanks to the digits behind them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType, dequantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of a tensor in GGUF, without `blk.N.` and `.weight`, and of its module in transformers."""


class UnknownGguf(ValueError):
    """The file is no Llama, or one whose tokenizer or rotary embeddings this module does not know."""


def convert(gguf: Path, folder: Path) -> None:
    """Write weights (float32, as llama.cpp dequantizes them), tokenizer and configs. Raises UnknownGguf."""
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for name, expected in {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }.items():
        if fields.get(name) != expected:
            raise UnknownGguf(f"{gguf}: {name} is {fields.get(name)!r}, expected {expected!r}")
    if scaling := [name for name in fields if name.startswith(("llama.rope.scaling", "llama.expert_count"))]:
        raise UnknownGguf(f"{gguf}: {scaling[0]} is set, expected a dense Llama with plain rotary embeddings")

    tokenizer = tokenizer_of(fields)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = config_of(fields, tied)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = dict(weights_of(reader, config))
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if wrong := expected.items() ^ {name: tuple(tensor.shape) for name, tensor in weights.items()}.items():
        raise UnknownGguf(f"{gguf}: missing, further or misshapen tensors: {sorted(dict(wrong))}")
    model.load_state_dict(weights, assign=True)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def config_of(fields: dict[str, Any], tied: bool) -> LlamaConfig:
    heads = fields["llama.attention.head_count"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=fields.get("llama.attention.head_count_kv", heads),
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=float(
            f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"
        ),  # a float32 in the file
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def weights_of(reader: GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and float32 values of each tensor, as transformers has them."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in reader.tensors:
        *block, name, kind = tensor.name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        if name not in TENSORS or kind != "weight":
            raise UnknownGguf(f"tensor {tensor.name} is unknown, expected one of {', '.join(TENSORS)}")
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name in heads:
            values = in_halves(values, heads[name])
        yield f"{prefix}{TENSORS[name]}.weight", torch.from_numpy(np.ascontiguousarray(values))


def in_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of queries or keys in the order of transformers.

    Rotary embeddings rotate pairs of rows of a head. llama.cpp has the rows of a pair side by side,
    transformers has them half a head apart.
    """
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tokenizer_of(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return the byte-level BPE with its special tokens and its chat template.

    `smollm` is llama.cpp's name for the way in which text is split before the merges: each digit alone, and
    the rest as in GPT-2.
    """
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    special = [
        token
        for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if kind == TokenType.CONTROL
    ]
    bpe = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    bpe.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        model_max_length=fields["llama.context_length"],
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )
