"""Arcee's AFM-4.5B: Llama with a squared ReLU and no gate in the feed-forward network."""

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, refuse
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, attention_bias=(False, None))
    return geometry_of(hf, grouped_attention(hf), rope_of(hf), act="relu2")
