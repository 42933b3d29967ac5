"""gpt-oss: softmax with sinks, a window in every second layer, biases everywhere, stacked experts.

The published checkpoints are in MXFP4, and are dequantized while they are loaded.
"""

from dataclasses import replace

from slipstream.bridge.families.parts import grouped_attention, norm, with_words
from slipstream.bridge.hf.config import HfConfig, integers, refuse
from slipstream.bridge.model import geometry as shared
from slipstream.bridge.model.geometry import (
    CLAMP,
    Experts,
    Geometry,
    GroupedAttention,
    geometry_of,
    window_of,
)
from slipstream.bridge.model.mapping import Columns, Mapping, Mappings, RowRun, Runs, Transposed, Whole
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]

_EXPERTS = "decoder.layers.{layer}.mlp.experts."
_LABEL = "feed-forward dimensions"


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, attention_bias=(True,), swiglu_limit=(CLAMP, None), num_experts=(hf.get("num_local_experts"),))
    count, per_token, ffn_hidden = integers(
        hf, "num_local_experts", "num_experts_per_tok", "intermediate_size"
    )
    attention = replace(shared.grouped_attention(hf, qkv_bias=True), sinks=True)
    experts = Experts(count, per_token, ffn_hidden, dense_layers=())
    return replace(
        geometry_of(hf, attention, rope_of(hf, theta=150000.0), experts=experts),
        window=window_of(hf, every=2),
        activation="clamped_swiglu",
        linear_biases=True,
    )


def mappings(geometry: Geometry) -> Mappings:
    attention, experts = geometry.attention, geometry.experts
    assert isinstance(attention, GroupedAttention) and experts is not None
    layer = (
        *grouped_attention(geometry, attention),
        norm("pre_mlp_layernorm", "post_attention_layernorm", geometry.hidden),
        *_router(experts.count, geometry.hidden),
        *_experts(experts.ffn_hidden, geometry.hidden),
    )
    return with_words(geometry, [layer] * geometry.n_layers)


def _router(count: int, hidden: int) -> list[Mapping]:
    return [
        Mapping(
            f"decoder.layers.{{layer}}.mlp.router.{kind}",
            (f"model.layers.{{layer}}.mlp.router.{kind}",),
            Whole(shape),
        )
        for kind, shape in (("weight", (count, hidden)), ("bias", (count,)))
    ]


def _experts(ffn_hidden: int, hidden: int) -> list[Mapping]:
    """Map the experts: HF stacks them, with inputs before outputs, and alternates gate and up."""

    def alternating(shape: tuple[int, ...]) -> Runs:
        halves = (RowRun(0, 0, 1, stride=2), RowRun(0, 1, 1, stride=2))
        return Runs((shape,), ffn_hidden, halves, by_unit=False, label=_LABEL)

    def mapping(layer: str, kind: str, hf: str, split: Transposed | Runs | Whole) -> Mapping:
        return Mapping(
            f"{_EXPERTS}local_experts.{{expert}}.{layer}.{kind}",
            (f"model.layers.{{layer}}.mlp.experts.{hf}",),
            split,
            te=f"{_EXPERTS}{layer}.{kind}{{expert}}",
            per_expert=True,
        )

    return [
        mapping("linear_fc1", "weight", "gate_up_proj", Transposed(alternating((2 * ffn_hidden, hidden)))),
        mapping("linear_fc1", "bias", "gate_up_proj_bias", alternating((2 * ffn_hidden,))),
        mapping("linear_fc2", "weight", "down_proj", Transposed(Columns(hidden, ffn_hidden, _LABEL))),
        mapping("linear_fc2", "bias", "down_proj_bias", Whole((hidden,))),
    ]
