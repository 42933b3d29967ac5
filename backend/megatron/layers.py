"""Megatron's spec of every layer of a model, for either kind of layers."""

import copy
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from slipstream.backend.megatron.local_layers import PackedAttention, RMSNorm
from slipstream.bridge.model.geometry import Geometry, GroupedAttention, LatentAttention
from slipstream.bridge.model.layout import LayerSpec


def layer_specs(geometry: Geometry, kind: LayerSpec) -> list[ModuleSpec]:
    """Of every layer of the model."""
    make = _transformer_engine if kind == "transformer_engine" else _local
    dense = make(geometry, None)
    mixed = make(geometry, geometry.experts.count) if geometry.experts else dense
    return [mixed if geometry.has_experts(layer) else dense for layer in range(geometry.n_layers)]


def final_norm(kind: LayerSpec) -> type:
    """The class of the norm behind the last layer."""
    if kind == "local":
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _has_qk_norm(geometry: Geometry) -> bool:
    return isinstance(geometry.attention, GroupedAttention) and geometry.attention.qk_norm


def _local(geometry: Geometry, experts: int | None) -> ModuleSpec:
    """Megatron's local spec, with packed attention and norms that know sequence parallelism."""
    qk_norm = _has_qk_norm(geometry)
    found = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=experts,
            qk_layernorm=qk_norm,
            multi_latent_attention=isinstance(geometry.attention, LatentAttention),
            normalization="RMSNorm",
        )
    )
    layer = found.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    layer.sharded_state_dict_keys_map = _stored_names(geometry, experts)
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return found


def _stored_names(geometry: Geometry, experts: int | None) -> dict[str, str]:
    """Where norms are in checkpoints: inside of linear layers where Transformer Engine's spec has them there,
    so that either spec reads what the other one wrote.
    """
    names = {}
    if isinstance(geometry.attention, GroupedAttention):
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if experts is None:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names


def _transformer_engine(geometry: Geometry, experts: int | None) -> ModuleSpec:
    """Megatron's spec for Transformer Engine: norms inside of linear layers, grouped experts.

    The norms of latent attention stay outside: like its down projections they come from here (``model``).
    """
    settings: dict[str, Any] = {"num_experts": experts, "moe_grouped_gemm": experts is not None}
    if isinstance(geometry.attention, LatentAttention):
        return get_gpt_layer_with_transformer_engine_spec(**settings, multi_latent_attention=True)
    return get_gpt_layer_with_transformer_engine_spec(**settings, qk_layernorm=_has_qk_norm(geometry))
