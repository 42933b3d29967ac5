"""Qwen2 and Qwen2.5: a bias on query, key and value."""

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    return geometry_of(hf, grouped_attention(hf, qkv_bias=True), rope_of(hf))
