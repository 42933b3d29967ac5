"""Gemma: Llama with GELU, norms that multiply by one plus their weight, and a scaled embedding."""

from dataclasses import replace
from math import sqrt

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, refuse
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]

_ACTIVATION = "gelu_pytorch_tanh"


def geometry(hf: HfConfig) -> Geometry:
    refuse(
        hf,
        hidden_activation=(_ACTIVATION, None),
        attention_bias=(False, None),
        use_bidirectional_attention=(False, None),
    )
    stated = geometry_of(hf, grouped_attention(hf), rope_of(hf), act=_ACTIVATION)
    return replace(stated, centered_norms=True, embedding_scale=sqrt(stated.hidden))
