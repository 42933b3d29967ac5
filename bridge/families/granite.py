"""Granite: Llama, with factors of the embedding, of attention, of each block and of the logits."""

from dataclasses import replace

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, number, refuse
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]

_FACTORS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, attention_bias=(False, None))
    attention, embedding, residual, logits = (number(hf, name, 1.0) for name in _FACTORS)
    others = {name: value for name, value in hf.items() if name not in _FACTORS}
    return replace(
        geometry_of(others, replace(grouped_attention(hf), scale=attention), rope_of(hf)),
        embedding_scale=embedding,
        residual_scale=residual,
        logit_scale=1 / logits,
    )
