"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with a softmax router, and a gate on the shared expert."""

from dataclasses import replace

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.families.qwen3_moe import softmax_experts
from slipstream.bridge.hf.config import HfConfig, integers
from slipstream.bridge.model.geometry import Experts, Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.rope import rope_of

__all__ = ["gated_experts", "geometry", "mappings"]


def gated_experts(hf: HfConfig, *, normalized: bool) -> Experts:
    """Read Qwen's experts with a gated shared one. ``normalized``: as in ``softmax_experts``."""
    (shared,) = integers(hf, "shared_expert_intermediate_size")
    return replace(softmax_experts(hf, normalized=normalized), shared_ffn_hidden=shared, shared_gate=True)


def geometry(hf: HfConfig) -> Geometry:
    attention = grouped_attention(hf, qkv_bias=bool(hf.get("qkv_bias", True)))
    return geometry_of(hf, attention, rope_of(hf), experts=gated_experts(hf, normalized=False))
