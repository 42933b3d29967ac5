"""OLMoE: norms over the queries and keys of all heads, and a softmax router in every layer."""

from dataclasses import replace

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.families.qwen3_moe import softmax_experts
from slipstream.bridge.hf.config import HfConfig, integers, refuse
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, attention_bias=(False, None))
    (ffn_hidden,) = integers(hf, "intermediate_size")
    experts = softmax_experts({**hf, "moe_intermediate_size": ffn_hidden}, normalized=False)
    attention = replace(grouped_attention(hf, qk_norm=True), joint_qk_norm=True)
    return geometry_of(hf, attention, rope_of(hf), experts=experts)
