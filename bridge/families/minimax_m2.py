"""MiniMax-M2: norms over the queries and keys of all heads, half-rotated heads, DeepSeek-V3's router."""

from dataclasses import replace

from slipstream.bridge.families.mixtral import block_sparse_name
from slipstream.bridge.families.parts import decoder
from slipstream.bridge.hf.config import HfConfig, UnsupportedModel, integer, integer_list, integers, refuse
from slipstream.bridge.model.geometry import Experts, Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.mapping import Mappings
from slipstream.bridge.model.rope import Rope, rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    refuse(
        hf,
        scoring_func=("sigmoid", None),
        use_routing_bias=(True, None),
        use_qk_norm=(True, None),
        qk_norm_type=("per_layer", None),
        shared_intermediate_size=(0, None),
        attention_bias=(False, None),
        sliding_window=(None,),
    )
    if other := sorted(set(integer_list(hf, "attn_type_list")) - {1}):
        raise UnsupportedModel(
            f"minimax_m2: attn_type_list in config.json has {other}, expected 1 for every layer: linear "
            "attention is not mapped"
        )
    count, per_token, ffn_hidden = integers(
        hf, "num_local_experts", "num_experts_per_tok", "intermediate_size"
    )
    attention = replace(grouped_attention(hf, qk_norm=True), joint_qk_norm=True)
    experts = Experts(count, per_token, ffn_hidden, dense_layers=(), score="sigmoid", bias=True)
    return geometry_of(hf, attention, _rope(hf, attention.head_dim), experts=experts)


def _rope(hf: HfConfig, head_dim: int) -> Rope:
    """Read ``rotary_dim``, which published configs have, or ``partial_rotary_factor``."""
    rotated = integer(hf, "rotary_dim")
    rope = rope_of(hf, fraction=1.0 if rotated is None else rotated / head_dim)
    if rotated is not None and rotated != int(head_dim * rope.fraction):
        raise UnsupportedModel(
            f"minimax_m2: rotary_dim is {rotated} in config.json, but partial_rotary_factor is "
            f"{rope.fraction}, which rotates {int(head_dim * rope.fraction)} of {head_dim} dimensions"
        )
    return rope


def mappings(geometry: Geometry) -> Mappings:
    return decoder(geometry).renamed(block_sparse_name)
