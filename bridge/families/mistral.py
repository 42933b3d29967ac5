"""Mistral 7B from v0.2 on, and other checkpoints with model_type mistral."""

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, UnsupportedModel, integer
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings", "refuse_windows"]


def refuse_windows(hf: HfConfig) -> None:
    """Raise UnsupportedModel for windows, without which SGLang serves these models."""
    window, positions = integer(hf, "sliding_window"), integer(hf, "max_position_embeddings") or 0
    if window is not None and window < positions:
        raise UnsupportedModel(
            f"{hf.get('model_type')}: attention within a window of {window} is not mapped; if no sequence is "
            "longer, lower max_position_embeddings in config.json to it"
        )


def geometry(hf: HfConfig) -> Geometry:
    refuse_windows(hf)
    return geometry_of(hf, grouped_attention(hf), rope_of(hf))
