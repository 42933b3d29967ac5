"""One declarative mapping per model family, found by the ``model_type`` of an HF config.

Adding a family is one file and one line here (docs/adding_a_model.md).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from slipstream.bridge.families import deepseek_v3, glm4_moe, llama, mistral, qwen2, qwen3, qwen3_moe
from slipstream.bridge.geometry import Geometry
from slipstream.bridge.hf_config import UnsupportedModel, read_config
from slipstream.bridge.mapping import Mapping, Mappings, Whole


class Family(Protocol):
    """A module in this package."""

    def geometry(self, hf: dict[str, Any]) -> Geometry: ...
    def mappings(self, geometry: Geometry) -> Mappings: ...


FAMILIES: dict[str, Family] = {
    "deepseek_v3": deepseek_v3,
    "glm4_moe": glm4_moe,
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}


@dataclass(frozen=True)
class ModelSpec:
    """An HF checkpoint directory, understood."""

    path: Path
    hf: dict[str, Any]
    geometry: Geometry
    mappings: Mappings
    gives_values: bool = False
    """One value per token in the place of logits."""


def model_spec(model_path: Path) -> ModelSpec:
    """Geometry and mapping of the HF checkpoint at ``model_path``. Raises UnsupportedModel."""
    return spec_of(read_config(model_path), Path(model_path))


def spec_of(hf: dict[str, Any], path: Path) -> ModelSpec:
    """Of a config that has been read; ``path`` is where the weights are, if they are needed."""
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        raise UnsupportedModel(f"model_type {kind!r} is not mapped; supported: {', '.join(sorted(FAMILIES))}")
    geometry = FAMILIES[kind].geometry(hf)
    return ModelSpec(path, hf, geometry, FAMILIES[kind].mappings(geometry))


def value_spec(spec: ModelSpec) -> ModelSpec:
    """The same decoder under a head with one value per token: HF's sequence classification with one label."""
    geometry = replace(spec.geometry, tied_embeddings=False)
    final_norm = spec.mappings.head[0]
    value = Mapping("output_layer.weight", ("score.weight",), Whole((1, geometry.hidden)), optional=True)
    mappings = replace(spec.mappings, head=(final_norm, value))
    return ModelSpec(spec.path, spec.hf, geometry, mappings, gives_values=True)
