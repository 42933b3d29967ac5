"""Small random models of every family, and layouts that can split them."""

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from slipstream.bridge.families import FAMILIES
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.mapping import copy_in
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.plan import entries, entries_of, pieces_of
from slipstream.bridge.shards.sends import tensor_name

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
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
"""Further settings of DeepSeek-V3 and of families with its attention and experts."""

LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
}
"""Further settings of families with linear attention."""

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

MIXTURES = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v_moe",
    "glm_moe_dsa",
    "gpt_oss",
    "kimi_k2",
    "kimi_k25",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl_moe",
    "solar_open",
)
HYBRIDS = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Families with linear attention."""
_SPARSE = ("deepseek_v32", "glm_moe_dsa")
_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "youtu", *_SPARSE)
TEXT_PARTS = {
    "glm46v": ("glm4", "glm4v_text"),
    "glm4v": ("glm4", "glm4v_text"),
    "gemma3": ("gemma3_text", "gemma3_text"),
    "glm4v_moe": ("glm4_moe", "glm4v_moe_text"),
    "kimi_k25": ("kimi_k2", "kimi_k2"),
    "mistral3": ("mistral", "mistral"),
    "qwen2_5_vl": ("qwen2", "qwen2_5_vl_text"),
    "qwen3_5": ("qwen3_5_text", "qwen3_5_text"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe_text"),
    "qwen3_vl": ("qwen3", "qwen3_vl_text"),
    "qwen3_vl_moe": ("qwen3_moe", "qwen3_vl_moe_text"),
}
"""The family of the language model in a larger model, and its ``model_type`` there."""
_EXPERT_COUNTS = {
    "gpt_oss": "num_local_experts",
    "minimax_m2": "num_local_experts",
    "mixtral": "num_local_experts",
    "olmoe": "num_experts",
    "qwen2_moe": "num_experts",
    "qwen3_5_moe_text": "num_experts",
    "qwen3_moe": "num_experts",
    "qwen3_next": "num_experts",
}
"""The setting with the number of experts, of families that do not call it ``n_routed_experts``."""


@st.composite
def hf_configs(draw, family: str | None = None) -> dict[str, Any]:
    """A config of four layers. Every size that ranks may share is divisible by two."""
    even = st.integers(1, 4).map(lambda n: 2 * n)
    some = st.integers(1, 9)
    family = family or draw(st.sampled_from(sorted(FAMILIES)))
    if family in TEXT_PARTS:
        text, kind = TEXT_PARTS[family]
        return {"model_type": family, "text_config": draw(hf_configs(text)) | {"model_type": kind}}
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
            _EXPERT_COUNTS.get(family, "n_routed_experts"): experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": draw(even),
        }
    if family == "qwen3_moe":
        hf |= {"mlp_only_layers": draw(st.lists(st.integers(0, 3), max_size=3))}
    if family == "qwen2_moe" or (family in HYBRIDS and family in MIXTURES):
        hf |= {"shared_expert_intermediate_size": draw(even)}
    if family in HYBRIDS:
        key_heads = draw(even)
        hf |= {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": key_heads * draw(st.integers(1, 3)),
            "linear_key_head_dim": draw(some),
            "linear_value_head_dim": draw(some),
            "linear_conv_kernel_dim": draw(st.integers(1, 4)),
            "layer_types": draw(
                st.lists(st.sampled_from(["linear_attention", "full_attention"]), min_size=4, max_size=4)
            ),
        }
    if family in (*_LATENT, "glm4_moe"):
        hf |= {
            "first_k_dense_replace": draw(st.integers(0, 4)),
            "n_shared_experts": draw(st.integers(0, 2)),
        }
    if family in ("exaone4", "gemma3_text", "gpt_oss"):
        hf |= {"sliding_window": 4}
    if family == "glm4_moe":
        hf |= {"attention_bias": draw(st.booleans()), "use_qk_norm": draw(st.booleans())}
    if family in ("seed_oss", "glm", "glm4"):
        hf |= {"attention_bias": draw(st.booleans())}
    if family == "glm4_moe_lite":
        dense = hf.pop("first_k_dense_replace")
        hf |= {"mlp_layer_types": ["dense"] * dense + ["sparse"] * (4 - dense)}
    if family in _SPARSE:
        hf |= {"index_n_heads": draw(some), "index_head_dim": draw(even), "index_topk": draw(some)}
    if family in _LATENT:
        hf |= {
            "q_lora_rank": draw(even if family in _SPARSE else st.none() | even),
            "kv_lora_rank": draw(even),
            "qk_nope_head_dim": draw(some),
            "qk_rope_head_dim": draw(even),
            "v_head_dim": draw(some),
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
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
    """Return tensors of random bits by HF name. Some are NaN or infinite, which copying must preserve.

    Tensors that are passed through are among them, in a dtype that the model does not have.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for entry in entries(spec, Layout()):
        kind = torch.float32 if entry.mapping.float32 else dtype
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            bits = torch.randint(-(2**15), 2**15, (*shape, kind.itemsize // 2), generator=generator)
            tensors[name] = bits.to(torch.int16).view(kind).view(shape)
    for prefix in spec.mappings.passed_through:
        tensors[f"{prefix}weight"] = torch.randn(3, 5, generator=generator).half()
    return tensors


def trained_tensors(spec: ModelSpec, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Return ``random_tensors`` without those that are passed through."""
    tensors = random_tensors(spec, dtype, seed)
    names = {name for entry in entries(spec, Layout()) for name in entry.hf_names}
    return {name: tensor for name, tensor in tensors.items() if name in names}


def trainer_shards(
    spec: ModelSpec, layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a trainer's rank by their names in messages, filled as a checkpoint is loaded."""
    shards: dict[str, torch.Tensor] = {}
    for entry, shard in entries_of(spec, layout, rank):
        dtype = tensors[entry.hf_names[0]].dtype
        parameter = torch.full(entry.split.shard_shape(shard.size), 7, dtype=dtype)
        sources = [entry.own_part(tensors[name]) for name in entry.hf_names]
        copy_in(parameter, sources, pieces_of(entry.split, shard))
        shards[tensor_name(entry.chunk, entry.parameter)] = parameter
    return shards


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        tensor.dtype == other.dtype
        and tensor.shape == other.shape
        and torch.equal(tensor.contiguous().view(torch.int16), other.contiguous().view(torch.int16))
    )
