"""One declarative mapping per model family, found by the ``model_type`` of an HF config.

Adding a family is one file and one line here (docs/adding_a_model.md).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bridge.families import deepseek_v3, glm4_moe, llama, mistral, qwen2, qwen3, qwen3_moe
from bridge.geometry import Geometry
from bridge.hf_config import UnsupportedModel, read_config
from bridge.mapping import Mappings


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
