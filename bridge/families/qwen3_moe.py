"""Qwen3-MoE: Qwen3 with a softmax router over many small experts."""

from typing import Any

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.geometry import Experts, Geometry, geometry_of, grouped_attention
from slipstream.bridge.hf_config import numbers, refuse
from slipstream.bridge.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: dict[str, Any]) -> Geometry:
    refuse(hf, attention_bias=(False, None))
    count_name = "num_experts" if "num_experts" in hf else "num_local_experts"  # since transformers 5
    count, per_token, ffn_hidden, layers = numbers(
        hf, count_name, "num_experts_per_tok", "moe_intermediate_size", "num_hidden_layers"
    )
    every, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    experts = Experts(
        count,
        per_token,
        ffn_hidden,
        dense_layers=tuple(i for i in range(layers) if i in dense or (i + 1) % every),
        normalized=bool(hf.get("norm_topk_prob", False)),
    )
    return geometry_of(hf, grouped_attention(hf, qk_norm=True), rope_of(hf), experts=experts)
