"""Mistral 7B from v0.2 on, and other checkpoints of model_type mistral."""

from typing import Any

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.hf_config import UnsupportedModel
from slipstream.bridge.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: dict[str, Any]) -> Geometry:
    window, positions = hf.get("sliding_window"), hf.get("max_position_embeddings") or 0
    if window is not None and window < positions:
        raise UnsupportedModel(
            f"mistral: attention within a window of {window} is not mapped; if no sequence is longer, lower "
            "max_position_embeddings in config.json to it"
        )
    return geometry_of(hf, grouped_attention(hf), rope_of(hf))
