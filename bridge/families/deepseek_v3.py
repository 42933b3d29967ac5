"""DeepSeek-V3 and R1: latent attention, a sigmoid router with a bias, shared experts, dense first layers."""

from typing import Any

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.geometry import Experts, Geometry, LatentAttention, geometry_of
from slipstream.bridge.hf_config import UnsupportedModel, numbers, refuse
from slipstream.bridge.rope import rope_of

__all__ = ["geometry", "mappings", "sigmoid_experts"]


def sigmoid_experts(hf: dict[str, Any]) -> Experts:
    count, per_token, ffn_hidden, dense, layers = numbers(
        hf,
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "first_k_dense_replace",
        "num_hidden_layers",
    )
    groups, groups_per_token = hf.get("n_group") or 1, hf.get("topk_group") or 1
    if not hf.get("norm_topk_prob", True) or per_token < 2:
        raise UnsupportedModel(
            f"{hf['model_type']}: experts whose weights are not normalized are not mapped (norm_topk_prob, "
            "num_experts_per_tok)"
        )
    if groups > 1 and per_token != 2 * groups_per_token:
        raise UnsupportedModel(
            f"{hf['model_type']}: {per_token} experts from {groups_per_token} groups: a group's score is "
            "that of its best two experts, which Megatron does for two experts per group only"
        )
    return Experts(
        count,
        per_token,
        ffn_hidden,
        dense_layers=tuple(range(min(dense, layers))),
        score="sigmoid",
        bias=True,
        scaling=float(hf.get("routed_scaling_factor", 1.0)),
        groups=groups,
        groups_per_token=groups_per_token,
        shared_ffn_hidden=ffn_hidden * (hf.get("n_shared_experts") or 0),
    )


def geometry(hf: dict[str, Any]) -> Geometry:
    refuse(
        hf,
        attention_bias=(False, None),
        rope_interleave=(True, None),
        scoring_func=("sigmoid",),
        topk_method=("noaux_tc",),
        moe_layer_freq=(1,),
    )
    heads, kv_rank, plain_dim, rotated_dim, value_dim = numbers(
        hf, "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    )
    attention = LatentAttention(heads, hf.get("q_lora_rank"), kv_rank, plain_dim, rotated_dim, value_dim)
    rope = rope_of(hf)
    if rope.fraction != 1 or not rope.truncate:
        raise UnsupportedModel(
            "deepseek_v3: rotary embeddings of a part of the rotated dimensions, or yarn with "
            "truncate=false, are not mapped: Megatron's latent attention has neither"
        )
    return geometry_of(hf, attention, rope, experts=sigmoid_experts(hf))
