"""SmolLM3: Llama, with layers whose queries and keys are not rotated."""

from dataclasses import replace

from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, UnsupportedModel, integer, integer_list, refuse
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, attention_bias=(False, None))
    stated = geometry_of(hf, grouped_attention(hf), rope_of(hf))
    return replace(stated, unrotated_layers=_unrotated(hf, stated.n_layers))


def _unrotated(hf: HfConfig, layers: int) -> tuple[int, ...]:
    """Read the layers that ``no_rope_layers`` marks by 0, or each at the end of an interval."""
    if not hf.get("no_rope_layers"):
        every = integer(hf, "no_rope_layer_interval") or 4
        return tuple(layer for layer in range(layers) if (layer + 1) % every == 0)
    rotated = integer_list(hf, "no_rope_layers")
    if len(rotated) != layers:
        raise UnsupportedModel(
            f"{hf['model_type']}: no_rope_layers has {len(rotated)} entries in config.json, expected {layers}"
        )
    return tuple(layer for layer, is_rotated in enumerate(rotated) if not is_rotated)
