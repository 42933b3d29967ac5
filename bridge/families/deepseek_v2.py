"""DeepSeek-V2-Lite: the latent attention of DeepSeek-V3, with a plain softmax router."""

from slipstream.bridge.families.deepseek_v3 import latent_decoder
from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, integer, integers, refuse
from slipstream.bridge.model.geometry import Experts, Geometry

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    # The weights of the experts are neither normalized nor scaled; engines disagree about what would be.
    refuse(
        hf,
        scoring_func=("softmax", None),
        topk_method=("greedy", None),
        norm_topk_prob=(False, None),
        routed_scaling_factor=(1, None),
    )
    count, per_token, ffn_hidden, layers = integers(
        hf, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "num_hidden_layers"
    )
    dense = integer(hf, "first_k_dense_replace") or 0
    experts = Experts(
        count,
        per_token,
        ffn_hidden,
        dense_layers=tuple(range(min(dense, layers))),
        normalized=False,
        shared_ffn_hidden=ffn_hidden * (integer(hf, "n_shared_experts") or 0),
    )
    return latent_decoder(hf, experts)
