"""GLM-4: half of each head is rotated, in pairs of neighbours; gate and up projection are one tensor.

GLM-4-0414 (``glm4``) has norms on the outputs of attention and of the feed-forward network as well.
"""

from dataclasses import replace

from slipstream.bridge.families.parts import decoder, decoder_with_post_norms, with_joined_rows
from slipstream.bridge.hf.config import HfConfig
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.mapping import Mappings
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    attention = grouped_attention(hf, qkv_bias=bool(hf.get("attention_bias", True)))
    rope = replace(rope_of(hf, fraction=0.5), interleaved=True)
    return replace(geometry_of(hf, attention, rope), post_norms=hf["model_type"] != "glm")


def mappings(geometry: Geometry) -> Mappings:
    norms = ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    whole = decoder_with_post_norms(geometry, norms) if geometry.post_norms else decoder(geometry)
    return with_joined_rows(whole, {"mlp.linear_fc1.weight": "mlp.gate_up_proj.weight"})
