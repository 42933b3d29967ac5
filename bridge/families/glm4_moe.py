"""GLM-4.5 and 4.6: attention that rotates half of each head, and DeepSeek-V3's router and experts."""

from slipstream.bridge.families.deepseek_v3 import sigmoid_experts
from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    attention = grouped_attention(
        hf, qkv_bias=bool(hf.get("attention_bias", False)), qk_norm=bool(hf.get("use_qk_norm", False))
    )
    return geometry_of(hf, attention, rope_of(hf, fraction=0.5), experts=sigmoid_experts(hf))
