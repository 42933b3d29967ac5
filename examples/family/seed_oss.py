"""Seed-OSS (`model_type: seed_oss`): the decoder of Llama with a bias on query, key and value."""

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, refuse
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, attention_bias=(True,), attention_out_bias=(False,), mlp_bias=(False, None))
    return geometry_of(hf, grouped_attention(hf, qkv_bias=True), rope_of(hf))
