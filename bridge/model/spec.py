"""An HF checkpoint directory with the geometry and the mappings of its model. Imports no torch."""

from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.bridge.hf.quantization import Quantization
from slipstream.bridge.model.geometry import Geometry
from slipstream.bridge.model.mapping import Mapping, Mappings, Whole


@dataclass(frozen=True)
class ModelSpec:
    """``families.model_spec`` makes one from a checkpoint directory."""

    path: Path
    geometry: Geometry
    mappings: Mappings
    gives_values: bool = False
    """The head gives one value per token instead of logits."""
    quantization: Quantization | None = None
    """Quantization of the weights in the checkpoint. The trainer dequantizes them."""


def value_spec(spec: ModelSpec) -> ModelSpec:
    """Return the same decoder with a head of one value per token.

    The head is that of HF's sequence classification with one label; a language model's checkpoint lacks it.
    """
    geometry = replace(spec.geometry, tied_embeddings=False)
    final_norm = spec.mappings.head[0]
    value = Mapping("output_layer.weight", ("score.weight",), Whole((1, geometry.hidden)), optional=True)
    mappings = replace(spec.mappings, head=(final_norm, value))
    return replace(spec, geometry=geometry, mappings=mappings, gives_values=True)
