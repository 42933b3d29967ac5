"""Phi-3 and Phi-4: Llama with query, key and value in one tensor, and gate and up projection in another."""

from slipstream.bridge.families.mistral import refuse_windows
from slipstream.bridge.families.parts import decoder, with_joined_rows
from slipstream.bridge.hf.config import HfConfig, refuse
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.mapping import Mappings
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, attention_bias=(False, None))
    refuse_windows(hf)
    return geometry_of(hf, grouped_attention(hf), rope_of(hf, fraction=1.0))


def mappings(geometry: Geometry) -> Mappings:
    joined = {
        "self_attention.linear_qkv.weight": "self_attn.qkv_proj.weight",
        "mlp.linear_fc1.weight": "mlp.gate_up_proj.weight",
    }
    return with_joined_rows(decoder(geometry), joined)
