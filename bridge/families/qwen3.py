"""Qwen3: a norm on each head's query and key."""

from typing import Any

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.hf_config import refuse
from slipstream.bridge.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: dict[str, Any]) -> Geometry:
    refuse(hf, attention_bias=(False, None))  # it would bias the output projection as well
    return geometry_of(hf, grouped_attention(hf, qk_norm=True), rope_of(hf))
