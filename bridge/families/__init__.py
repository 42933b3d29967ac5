"""The supported model families, by the ``model_type`` of an HF config.

A family is one module in this package: it reads the config and lists the mappings. To add one, write the
module and add a line to ``FAMILIES`` (docs/adding_a_model.md).
"""

from pathlib import Path
from typing import Protocol

from slipstream.bridge.families import deepseek_v3, glm4_moe, llama, mistral, qwen2, qwen3, qwen3_moe
from slipstream.bridge.hf.config import HfConfig, UnsupportedModel, read_config
from slipstream.bridge.model.geometry import Geometry
from slipstream.bridge.model.mapping import Mappings
from slipstream.bridge.model.spec import ModelSpec


class Family(Protocol):
    """A module of this package."""

    def geometry(self, hf: HfConfig) -> Geometry:
        """Read the config. Raises UnsupportedModel."""
        ...

    def mappings(self, geometry: Geometry) -> Mappings:
        """List all parameters of the model."""
        ...


FAMILIES: dict[str, Family] = {
    "deepseek_v3": deepseek_v3,
    "glm4_moe": glm4_moe,
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}


def model_spec(model_path: Path) -> ModelSpec:
    """Read the config of the HF checkpoint directory ``model_path``. Raises UnsupportedModel."""
    return spec_of(read_config(model_path), Path(model_path))


def spec_of(hf: HfConfig, path: Path) -> ModelSpec:
    """Return the spec of a config. ``path``: where the weights are; it is not read here."""
    kind = hf.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UnsupportedModel(f"model_type {kind!r} is not mapped; supported: {', '.join(sorted(FAMILIES))}")
    geometry = family.geometry(hf)
    return ModelSpec(path, geometry, family.mappings(geometry))
