"""Megatron's spec of every layer of a model, for either kind of layers."""

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import cast

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from slipstream.backend.megatron.delta_net import DeltaNetSubmodules, PackedDeltaNet
from slipstream.backend.megatron.local_layers import JointHeadsNorm, LayerNorm, PackedAttention, RMSNorm
from slipstream.backend.megatron.router import Router
from slipstream.backend.megatron.sparse_attention import SparseAttention, SparseLatentAttention
from slipstream.bridge.model.geometry import (
    DeltaNet,
    Experts,
    Geometry,
    GroupedAttention,
    LatentAttention,
    Window,
)
from slipstream.bridge.model.layout import LayerSpec

WithBias = tuple[Tensor, Tensor | None]
AddResidual = Callable[[WithBias, Tensor, float], Tensor]


class PostNormLayer(TransformerLayer):
    """A layer whose attention and feed-forward network have norms on their outputs too."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # pyright: ignore[reportArgumentType]
        config = self.config
        size = (config, config.hidden_size, config.layernorm_epsilon)
        self.post_attention_layernorm = RMSNorm(*size)
        self.post_mlp_layernorm = RMSNorm(*size)
        self.self_attn_bda = _after(self.post_attention_layernorm, self.self_attn_bda)
        self.mlp_bda = _after(self.post_mlp_layernorm, self.mlp_bda)


class ScaledLayer(TransformerLayer):
    """A layer whose attention and feed-forward network are multiplied by a constant."""

    def __init__(self, *args: object, scale: float, **options: object) -> None:
        super().__init__(*args, **options)  # pyright: ignore[reportArgumentType]
        times = partial(torch.mul, other=scale)
        self.self_attn_bda = _after(times, self.self_attn_bda)
        self.mlp_bda = _after(times, self.mlp_bda)


def _after(
    change: Callable[[Tensor], Tensor], bda: Callable[[bool, bool], AddResidual]
) -> Callable[[bool, bool], AddResidual]:
    """Return Megatron's addition of bias, dropout and residual, which changes its input first."""

    def chosen(training: bool, fused: bool) -> AddResidual:
        add = bda(training, fused)

        def add_changed(output: WithBias, residual: Tensor, dropout: float) -> Tensor:
            hidden, bias = output
            return add((change(hidden if bias is None else hidden + bias), None), residual, dropout)

        return add_changed

    return chosen


class WindowRotaryEmbedding(RotaryEmbedding):
    """The rotary embedding of the layers with a window, where it is another one than that of the model."""


class WindowRopeAttention(SelfAttention):
    """Attention that rotates queries and keys by ``frequencies``, instead of by the model's."""

    def __init__(self, *args: object, frequencies: tuple[float, ...], **options: object) -> None:
        super().__init__(*args, **options)  # pyright: ignore[reportArgumentType]
        self.window_rotary = WindowRotaryEmbedding(
            2 * len(frequencies),
            rotary_percent=1.0,
            use_cpu_initialization=self.config.use_cpu_initialization,
            cp_group=self.pg_collection.cp,
        )
        self.window_rotary.inv_freq = torch.tensor(
            frequencies, dtype=torch.float32, device=self.window_rotary.inv_freq.device
        )

    def forward(self, *args: object, rotary_pos_emb: Tensor, **options: object) -> WithBias:
        """``rotary_pos_emb``: the model's angles [positions, 1, 1, rotated], of which the length is used."""
        angles = self.window_rotary(rotary_pos_emb.shape[0], packed_seq=True)
        return cast("WithBias", super().forward(*args, rotary_pos_emb=angles, **options))  # pyright: ignore[reportArgumentType]


def layer_specs(geometry: Geometry, kind: LayerSpec) -> list[ModuleSpec]:
    """Return the spec of every layer of the model."""
    make = _transformer_engine if kind == "transformer_engine" else _local

    @cache
    def spec_of(experts: Experts | None, delta: DeltaNet | None, window: Window | None) -> ModuleSpec:
        count = experts.count if experts is not None else None
        return _varied(make(geometry, count, delta), geometry, window, experts)

    return [
        spec_of(
            geometry.experts if geometry.has_experts(layer) else None,
            geometry.delta_of(layer),
            geometry.window_of(layer),
        )
        for layer in range(geometry.n_layers)
    ]


def _mlp_submodules(mlp: object) -> object:
    """Return the submodules of a feed-forward network, of which Megatron makes a partial from 0.19 on."""
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else cast("ModuleSpec", mlp).submodules


def _varied(
    spec: ModuleSpec, geometry: Geometry, window: Window | None, experts: Experts | None
) -> ModuleSpec:
    """Put the classes into a layer's spec that Megatron's own functions do not know of."""
    if geometry.post_norms:
        spec.module = PostNormLayer
    if geometry.residual_scale != 1.0:
        spec.module, spec.params = ScaledLayer, {"scale": geometry.residual_scale}
    submodules = cast("TransformerLayerSubmodules", spec.submodules)
    if experts is not None:
        router = partial(Router, normalizes=experts.normalized)
        of_experts = cast("MoESubmodules", _mlp_submodules(submodules.mlp))
        of_experts.router = router  # pyright: ignore[reportAttributeAccessIssue]
    attention = cast("ModuleSpec", submodules.self_attention)
    if window is not None and window.rope is not None:
        attention.module = WindowRopeAttention
        attention.params["frequencies"] = tuple(window.rope.frequencies(geometry.rotated_dim))
    if isinstance(geometry.attention, LatentAttention) and geometry.attention.indexer is not None:
        attention.module = SparseLatentAttention
        attention.params["indexer"] = geometry.attention.indexer
        cast("SelfAttentionSubmodules", attention.submodules).core_attention = SparseAttention
    return spec


def _without_pre_norms(layer: TransformerLayerSubmodules, linear: type) -> None:
    """Remove the norms before attention and before the feed-forward network of a dense layer.

    ``linear``: the layer that projects into them, which has no norm inside.
    """
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    attention = cast("SelfAttentionSubmodules", cast("ModuleSpec", layer.self_attention).submodules)
    attention.linear_qkv = linear
    cast("MLPSubmodules", _mlp_submodules(layer.mlp)).linear_fc1 = linear


def final_norm(geometry: Geometry, kind: LayerSpec) -> type:
    """Return the class of the norm after the last layer."""
    if kind == "local":
        return _norm(geometry)
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _norm(geometry: Geometry) -> type:
    return LayerNorm if geometry.layer_norms else RMSNorm


def _has_qk_norm(geometry: Geometry) -> bool:
    return isinstance(geometry.attention, GroupedAttention) and geometry.attention.qk_norm


def _local(geometry: Geometry, experts: int | None, delta: DeltaNet | None) -> ModuleSpec:
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
    layer.input_layernorm = layer.pre_mlp_layernorm = _norm(geometry)
    layer.sharded_state_dict_keys_map = _stored_names(geometry, experts, delta)
    if delta is not None:
        layer.self_attention = _delta_net(delta, ColumnParallelLinear, RowParallelLinear)
        return spec
    # Latent attention has more submodules; those that are set here have the same names.
    attention = cast("SelfAttentionSubmodules", cast("ModuleSpec", layer.self_attention).submodules)
    attention.core_attention = PackedAttention
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    _set_joint_norms(geometry, attention)
    if not geometry.pre_norms:
        _without_pre_norms(layer, ColumnParallelLinear)
    return spec


def _set_joint_norms(geometry: Geometry, submodules: SelfAttentionSubmodules) -> None:
    """Replace the norms of queries and keys by norms that span all heads, if the model has those."""
    attention = geometry.attention
    if isinstance(attention, GroupedAttention) and attention.joint_qk_norm:
        submodules.q_layernorm = ModuleSpec(JointHeadsNorm, {"heads": attention.heads})
        submodules.k_layernorm = ModuleSpec(JointHeadsNorm, {"heads": attention.kv_heads})


def _delta_net(delta: DeltaNet, in_proj: type, out_proj: type) -> ModuleSpec:
    return ModuleSpec(
        module=PackedDeltaNet, params={"delta": delta}, submodules=DeltaNetSubmodules(in_proj, out_proj)
    )


def _stored_names(geometry: Geometry, experts: int | None, delta: DeltaNet | None) -> dict[str, str]:
    """Return the names of norms in checkpoints, by their names in the local spec.

    A norm that Transformer Engine's spec has inside of a linear layer is stored there, so that either spec
    reads what the other one wrote.
    """
    names: dict[str, str] = {}
    if delta is not None:
        names["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    elif isinstance(geometry.attention, GroupedAttention):
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if experts is None:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names


def _transformer_engine(geometry: Geometry, experts: int | None, delta: DeltaNet | None) -> ModuleSpec:
    """Megatron's spec for Transformer Engine: norms inside of linear layers, grouped experts.

    The norms of latent attention stay outside: like its down projections they are replaced in ``model``.
    """
    grouped = experts is not None
    if isinstance(geometry.attention, LatentAttention):
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=grouped, multi_latent_attention=True
        )
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts, moe_grouped_gemm=grouped, qk_layernorm=_has_qk_norm(geometry)
    )
    layer = cast("TransformerLayerSubmodules", spec.submodules)
    if delta is not None:
        from megatron.core.extensions.transformer_engine import (
            TELayerNormColumnParallelLinear,
            TERowParallelLinear,
        )

        layer.self_attention = _delta_net(delta, TELayerNormColumnParallelLinear, TERowParallelLinear)
        return spec
    attention = cast("SelfAttentionSubmodules", cast("ModuleSpec", layer.self_attention).submodules)
    _set_joint_norms(geometry, attention)
    if not geometry.pre_norms:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        _without_pre_norms(layer, TEColumnParallelLinear)
    return spec
