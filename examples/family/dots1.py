"""dots.llm1 (`model_type: dots1`): the attention of Qwen3, and the router and experts of DeepSeek-V3."""

from slipstream.bridge.families.deepseek_v3 import sigmoid_experts
from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, integers, refuse
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    (layers,) = integers(hf, "num_hidden_layers")
    refuse(hf, attention_bias=(False, None), layer_types=(["full_attention"] * layers, None))
    experts = sigmoid_experts({"norm_topk_prob": False, **hf})  # a config that lacks it means false
    return geometry_of(hf, grouped_attention(hf, qk_norm=True), rope_of(hf), experts=experts)
