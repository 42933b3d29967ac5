"""The language model of Qwen3-VL with experts: Qwen3-MoE, published with stacked and transposed experts."""

from dataclasses import replace

from slipstream.bridge.families.parts import decoder
from slipstream.bridge.families.qwen3_moe import geometry
from slipstream.bridge.model.geometry import Geometry
from slipstream.bridge.model.mapping import Mappings

__all__ = ["geometry", "mappings"]


def mappings(geometry: Geometry) -> Mappings:
    return replace(decoder(geometry), experts="transposed")
