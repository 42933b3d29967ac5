"""Seed-OSS: the decoder of Llama with a bias on query, key and value."""

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, refuse
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, attention_out_bias=(False, None))
    biased = bool(hf.get("attention_bias", True))
    return geometry_of(hf, grouped_attention(hf, qkv_bias=biased), rope_of(hf))
