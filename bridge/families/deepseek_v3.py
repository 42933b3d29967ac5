"""DeepSeek-V3 and R1: latent attention, a sigmoid router with a bias, shared experts, dense first layers."""

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, UnsupportedModel, integer, integers, number, refuse
from slipstream.bridge.model.geometry import Experts, Geometry, LatentAttention, geometry_of
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "latent_decoder", "mappings", "sigmoid_experts"]


def sigmoid_experts(hf: HfConfig) -> Experts:
    """Read DeepSeek-V3's router and experts. Raises UnsupportedModel for variants that Megatron lacks."""
    count, per_token, ffn_hidden, dense, layers = integers(
        hf,
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "first_k_dense_replace",
        "num_hidden_layers",
    )
    groups, groups_per_token = integer(hf, "n_group") or 1, integer(hf, "topk_group") or 1
    if not hf.get("norm_topk_prob", True) or per_token < 2:
        raise UnsupportedModel(
            f"{hf['model_type']}: experts whose weights are not normalized are not mapped (norm_topk_prob, "
            "num_experts_per_tok)"
        )
    if groups > 1 and per_token != 2 * groups_per_token:
        raise UnsupportedModel(
            f"{hf['model_type']}: {per_token} experts from {groups_per_token} groups are not mapped: a group "
            "is scored by its best two experts, which Megatron supports only for two experts per group"
        )
    return Experts(
        count,
        per_token,
        ffn_hidden,
        dense_layers=tuple(range(min(dense, layers))),
        score="sigmoid",
        bias=True,
        scaling=number(hf, "routed_scaling_factor", 1.0),
        groups=groups,
        groups_per_token=groups_per_token,
        shared_ffn_hidden=ffn_hidden * (integer(hf, "n_shared_experts") or 0),
    )


def latent_decoder(hf: HfConfig, experts: Experts | None) -> Geometry:
    """Read a decoder with DeepSeek's latent attention. Raises UnsupportedModel."""
    refuse(hf, attention_bias=(False, None), rope_interleave=(True, None), moe_layer_freq=(1,))
    heads, kv_rank, plain_dim, rotated_dim, value_dim = integers(
        hf, "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    )
    query_rank = integer(hf, "q_lora_rank")
    attention = LatentAttention(heads, query_rank, kv_rank, plain_dim, rotated_dim, value_dim)
    rope = rope_of(hf, fraction=1.0)
    if rope.fraction != 1 or not rope.truncate:
        raise UnsupportedModel(
            f"{hf['model_type']}: rotary embeddings of a part of the rotated dimensions, or yarn with "
            "truncate=false, are not mapped: Megatron's latent attention has neither"
        )
    return geometry_of(hf, attention, rope, experts=experts)


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    return latent_decoder(hf, sigmoid_experts(hf))
