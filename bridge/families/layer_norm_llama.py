"""StableLM 2 and Nemotron (Minitron): decoders like Llama's, whose norms subtract the mean and have biases.

Nemotron has a squared ReLU without a gate, and norms that multiply by one plus their weight.
"""

from dataclasses import replace

from slipstream.bridge.families.parts import decoder, with_norm_biases
from slipstream.bridge.hf.config import HfConfig, refuse
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.mapping import Mappings
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, attention_bias=(False, None), use_parallel_residual=(False, None), qk_layernorm=(False, None))
    is_nemotron = hf["model_type"] == "nemotron"
    attention = grouped_attention(hf, qkv_bias=bool(hf.get("use_qkv_bias", False)))
    rope = rope_of(hf, fraction=0.5 if is_nemotron else 0.25)
    act, eps = ("relu2", "norm_eps") if is_nemotron else ("silu", "layer_norm_eps")
    stated = geometry_of(hf, attention, rope, act=act, eps=eps)
    return replace(stated, layer_norms=True, centered_norms=is_nemotron)


def mappings(geometry: Geometry) -> Mappings:
    return with_norm_biases(decoder(geometry))
