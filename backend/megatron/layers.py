"""Megatron's spec of every layer of a model, for either kind of layers."""

import copy
from typing import cast

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from slipstream.backend.megatron.local_layers import PackedAttention, RMSNorm
from slipstream.bridge.model.geometry import Geometry, GroupedAttention, LatentAttention
from slipstream.bridge.model.layout import LayerSpec


def layer_specs(geometry: Geometry, kind: LayerSpec) -> list[ModuleSpec]:
    """Return the spec of every layer of the model."""
    make = _transformer_engine if kind == "transformer_engine" else _local
    dense = make(geometry, None)
    mixed = make(geometry, geometry.experts.count) if geometry.experts else dense
    return [mixed if geometry.has_experts(layer) else dense for layer in range(geometry.n_layers)]


def final_norm(kind: LayerSpec) -> type:
    """Return the class of the norm after the last layer."""
    if kind == "local":
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _has_qk_norm(geometry: Geometry) -> bool:
    return isinstance(geometry.attention, GroupedAttention) and geometry.attention.qk_norm


def _local(geometry: Geometry, experts: int | None) -> ModuleSpec:
    """Megatron's local spec, with packed attention and norms that support sequence parallelism."""
    qk_norm = _has_qk_norm(geometry)
    spec = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=experts,
            qk_layernorm=qk_norm,
            multi_latent_attention=isinstance(geometry.attention, LatentAttention),
            normalization="RMSNorm",
        )
    )
    layer = cast("TransformerLayerSubmodules", spec.submodules)
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    layer.sharded_state_dict_keys_map = _stored_names(geometry, experts)
    # Latent attention has more submodules; those that are set here have the same names.
    attention = cast("SelfAttentionSubmodules", cast("ModuleSpec", layer.self_attention).submodules)
    attention.core_attention = PackedAttention
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def _stored_names(geometry: Geometry, experts: int | None) -> dict[str, str]:
    """Return the names of norms in checkpoints, by their names in the local spec.

    A norm that Transformer Engine's spec has inside of a linear layer is stored there, so that either spec
    reads what the other one wrote.
    """
    names: dict[str, str] = {}
    if isinstance(geometry.attention, GroupedAttention):
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if experts is None:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names


def _transformer_engine(geometry: Geometry, experts: int | None) -> ModuleSpec:
    """Megatron's spec for Transformer Engine: norms inside of linear layers, grouped experts.

    The norms of latent attention stay outside: like its down projections they are replaced in ``model``.
    """
    grouped = experts is not None
    if isinstance(geometry.attention, LatentAttention):
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=grouped, multi_latent_attention=True
        )
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts, moe_grouped_gemm=grouped, qk_layernorm=_has_qk_norm(geometry)
    )
