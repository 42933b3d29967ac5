"""Solar-Open: the attention of Llama, and DeepSeek-V3's router and experts in every layer."""

from slipstream.bridge.families.deepseek_v3 import sigmoid_experts
from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, refuse
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, attention_bias=(False, None))
    # A config may have settings of GLM-4.5, from which transformers derives the class, that it does not read.
    decoder: HfConfig = {"intermediate_size": 0, **hf, "first_k_dense_replace": 0}
    rope = rope_of(decoder, fraction=1.0)
    return geometry_of(decoder, grouped_attention(hf), rope, experts=sigmoid_experts(decoder))
