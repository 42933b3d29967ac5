"""Mixtral: the decoder of Mistral, with a softmax router over wide experts."""

from dataclasses import replace

from slipstream.bridge.families import mistral
from slipstream.bridge.families.parts import decoder
from slipstream.bridge.hf.config import HfConfig, integers, refuse
from slipstream.bridge.model.geometry import Experts, Geometry
from slipstream.bridge.model.mapping import Mappings

__all__ = ["block_sparse_name", "geometry", "mappings"]

_NAMES = {
    "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
    "mlp.": "block_sparse_moe.",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
"""Parts of names here, by those of other families."""


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, router_jitter_noise=(0, None))
    count, per_token, ffn_hidden = integers(
        hf, "num_local_experts", "num_experts_per_tok", "intermediate_size"
    )
    return replace(mistral.geometry(hf), experts=Experts(count, per_token, ffn_hidden, dense_layers=()))


def mappings(geometry: Geometry) -> Mappings:
    return decoder(geometry).renamed(block_sparse_name)


def block_sparse_name(name: str) -> str:
    """Return the name of a tensor in Mixtral's checkpoints, and in those of models that follow them."""
    if ".mlp." in name:
        for other, here in _NAMES.items():
            name = name.replace(other, here)
    return name
