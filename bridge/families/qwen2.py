"""Qwen2 and Qwen2.5: a bias on query, key and value."""

from typing import Any

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: dict[str, Any]) -> Geometry:
    return geometry_of(hf, grouped_attention(hf, qkv_bias=True), rope_of(hf))
