"""Qwen3-Next: three layers of linear attention to one of gated attention, and a gate on the shared expert."""

from dataclasses import replace
from typing import cast

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.families.qwen2_moe import gated_experts
from slipstream.bridge.hf.config import HfConfig, UnsupportedModel, integer, integers, refuse
from slipstream.bridge.model.geometry import DeltaNet, Experts, Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "hybrid", "mappings"]

_LINEAR, _FULL = "linear_attention", "full_attention"


def hybrid(hf: HfConfig, *, interleaved: bool, experts: Experts | None) -> Geometry:
    """Read a decoder in which some layers have linear attention and the others gated attention.

    ``interleaved``: how HF has the projections into linear attention, see ``DeltaNet``. Raises
    UnsupportedModel.
    """
    refuse(hf, attention_bias=(False, None), attn_output_gate=(True, None))
    key_heads, value_heads, key_dim, value_dim, kernel, layers = integers(
        hf,
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "num_hidden_layers",
    )
    if value_heads % key_heads:
        raise UnsupportedModel(
            f"{hf['model_type']}: linear_num_value_heads={value_heads} is no multiple of "
            f"linear_num_key_heads={key_heads}"
        )
    attention = replace(grouped_attention(hf, qk_norm=True), gate=True)
    decoder = geometry_of(hf, attention, rope_of(hf, fraction=0.25), experts=experts)
    return replace(
        decoder,
        delta=DeltaNet(key_heads, value_heads, key_dim, value_dim, kernel, interleaved),
        delta_layers=_linear_layers(hf, layers),
        centered_norms=True,
        extra_prefix="mtp.",
    )


def _linear_layers(hf: HfConfig, layers: int) -> tuple[int, ...]:
    """Return the numbers of the layers with linear attention. Raises UnsupportedModel."""
    stated = hf.get("layer_types")
    if stated is None:
        interval = integer(hf, "full_attention_interval") or 4
        return tuple(layer for layer in range(layers) if (layer + 1) % interval)
    kinds = cast("list[object]", stated) if isinstance(stated, list) else []
    if len(kinds) != layers or any(kind not in (_LINEAR, _FULL) for kind in kinds):
        raise UnsupportedModel(
            f"{hf['model_type']}: layer_types={stated!r}: expected a list with {_LINEAR!r} or {_FULL!r} for "
            f"each of {layers} layers"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)


def geometry(hf: HfConfig) -> Geometry:
    return hybrid(hf, interleaved=True, experts=gated_experts(hf, normalized=True))
