"""The language models of Qwen3.5, dense and with experts: Qwen3-Next with separate projections."""

from dataclasses import replace

from slipstream.bridge.families.parts import decoder
from slipstream.bridge.families.qwen2_moe import gated_experts
from slipstream.bridge.families.qwen3_next import hybrid
from slipstream.bridge.hf.config import HfConfig, refuse
from slipstream.bridge.model.geometry import Geometry
from slipstream.bridge.model.mapping import Mappings

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    if hf["model_type"] == "qwen3_5_text":
        return hybrid(hf, interleaved=False, experts=None)
    # All layers have experts, whose weights transformers always normalizes.
    refuse(hf, decoder_sparse_step=(1, None), mlp_only_layers=([], None), norm_topk_prob=(True, None))
    experts = gated_experts(hf, normalized=True)
    return hybrid({"intermediate_size": 0, **hf}, interleaved=False, experts=experts)


def mappings(geometry: Geometry) -> Mappings:
    return replace(decoder(geometry), experts="stacked")
