"""OLMo 2: norms on the outputs of attention and of the feed-forward network, and none on their inputs."""

from dataclasses import replace

from slipstream.bridge.families.parts import decoder_with_post_norms
from slipstream.bridge.hf.config import HfConfig, refuse
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.mapping import Mappings
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, attention_bias=(False, None))
    attention = replace(grouped_attention(hf, qk_norm=True), joint_qk_norm=True)
    return replace(geometry_of(hf, attention, rope_of(hf)), pre_norms=False, post_norms=True)


def mappings(geometry: Geometry) -> Mappings:
    return decoder_with_post_norms(geometry, ("post_attention_layernorm", "", "post_feedforward_layernorm"))
