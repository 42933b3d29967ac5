"""Qwen3-MoE: Qwen3 with a softmax router over many small experts."""

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, integer, integer_list, integers, refuse
from slipstream.bridge.model.geometry import Experts, Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings", "softmax_experts"]


def softmax_experts(hf: HfConfig, *, normalized: bool) -> Experts:
    """Read Qwen's router and experts. ``normalized``: the family's default for ``norm_topk_prob``."""
    count_name = "num_experts" if "num_experts" in hf else "num_local_experts"  # since transformers 5
    count, per_token, ffn_hidden, layers = integers(
        hf, count_name, "num_experts_per_tok", "moe_intermediate_size", "num_hidden_layers"
    )
    sparse_step, dense = integer(hf, "decoder_sparse_step") or 1, integer_list(hf, "mlp_only_layers")
    return Experts(
        count,
        per_token,
        ffn_hidden,
        dense_layers=tuple(i for i in range(layers) if i in dense or (i + 1) % sparse_step),
        normalized=bool(hf.get("norm_topk_prob", normalized)),
    )


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, attention_bias=(False, None))
    experts = softmax_experts(hf, normalized=False)
    return geometry_of(hf, grouped_attention(hf, qk_norm=True), rope_of(hf), experts=experts)
