"""Small random models of every family, and layouts that can split them."""

from typing import Any

import torch
from hypothesis import strategies as st

from slipstream.bridge.families import FAMILIES
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.plan import entries, entries_of

CONFIG = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
"""Settings that every family has."""

DEEPSEEK = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
"""Further settings of DeepSeek-V3."""

LAYOUTS = {
    "one rank": Layout(),
    "tensor 2": Layout(tensor=2),
    "pipeline 2": Layout(pipeline=2),
    "virtual pipeline 2": Layout(pipeline=2, chunks=2),
    "uneven pipeline": Layout(pipeline=2, layers=(1, 3)),
    "data 2": Layout(data=2),
    "expert 2": Layout(data=2, expert=2),
    "tensor 2, expert 2": Layout(tensor=2, expert=2, expert_tensor=1),
    "expert tensor 2": Layout(tensor=2, data=2, expert=2, expert_tensor=2),
    "expert tensor 2 over data": Layout(data=2, expert_tensor=2),
    "tensor 2, pipeline 2": Layout(tensor=2, pipeline=2),
    "pipeline 2, expert 2": Layout(pipeline=2, data=2, expert=2),
    "virtual pipeline 2, tensor 2": Layout(tensor=2, pipeline=2, layers=(1, 0, 1, 2), chunks=2),
}
"""Layouts for models of four layers."""

MIXTURES = ("deepseek_v3", "glm4_moe", "qwen3_moe")


@st.composite
def hf_configs(draw, family: str | None = None) -> dict[str, Any]:
    """A config of four layers. Every size that ranks may share is divisible by two."""
    even = st.integers(1, 4).map(lambda n: 2 * n)
    some = st.integers(1, 9)
    family = family or draw(st.sampled_from(sorted(FAMILIES)))
    groups = draw(even)
    hf = {
        "model_type": family,
        "num_hidden_layers": 4,
        "hidden_size": draw(some),
        "intermediate_size": draw(even),
        "num_attention_heads": groups * draw(st.integers(1, 3)),
        "num_key_value_heads": groups,
        "head_dim": draw(even),
        "vocab_size": draw(st.integers(1, 23)),
        "max_position_embeddings": 32,
        "tie_word_embeddings": draw(st.booleans()),
    }
    if family in MIXTURES:
        experts = draw(even)
        hf |= {
            "num_experts" if family == "qwen3_moe" else "n_routed_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": draw(even),
        }
    if family == "qwen3_moe":
        hf |= {"mlp_only_layers": draw(st.lists(st.integers(0, 3), max_size=3))}
    if family in ("deepseek_v3", "glm4_moe"):
        hf |= {
            "first_k_dense_replace": draw(st.integers(0, 4)),
            "n_shared_experts": draw(st.integers(0, 2)),
        }
    if family == "glm4_moe":
        hf |= {"attention_bias": draw(st.booleans()), "use_qk_norm": draw(st.booleans())}
    if family == "deepseek_v3":
        hf |= {
            "q_lora_rank": draw(st.none() | even),
            "kv_lora_rank": draw(even),
            "qk_nope_head_dim": draw(some),
            "qk_rope_head_dim": draw(even),
            "v_head_dim": draw(some),
        }
    return hf


def empty_parameters(
    spec: ModelSpec, layout: Layout, rank: int, dtype: torch.dtype = torch.float32
) -> list[dict[str, torch.Tensor]]:
    """Return the parameters that Megatron would create for a rank, filled with NaN."""
    parameters: list[dict[str, torch.Tensor]] = [{} for _ in range(layout.chunks)]
    for entry, shard in entries_of(spec, layout, rank):
        kind = torch.float32 if entry.mapping.float32 else dtype
        parameters[entry.chunk][entry.parameter] = torch.full(
            entry.split.shard_shape(shard.size), torch.nan, dtype=kind
        )
    return parameters


def random_tensors(spec: ModelSpec, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of random bits by HF name. Some are NaN or infinite, which copying must preserve."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for entry in entries(spec, Layout()):
        kind = torch.float32 if entry.mapping.float32 else dtype
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            bits = torch.randint(-(2**15), 2**15, (*shape, kind.itemsize // 2), generator=generator)
            tensors[name] = bits.to(torch.int16).view(kind).view(shape)
    return tensors


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        tensor.dtype == other.dtype
        and tensor.shape == other.shape
        and torch.equal(tensor.contiguous().view(torch.int16), other.contiguous().view(torch.int16))
    )
