"""The supported model families, by the ``model_type`` of an HF config.

A family is one module: it reads the config and lists the mappings. Those of this package are in ``FAMILIES``;
a recipe names others by import path, in ``model.families`` (docs/adding_a_model.md).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from slipstream.bridge.families import deepseek_v3, glm4_moe, llama, mistral, qwen2, qwen3, qwen3_moe
from slipstream.bridge.hf.config import HfConfig, UnsupportedModel, read_config
from slipstream.bridge.model.geometry import Geometry
from slipstream.bridge.model.mapping import Mappings
from slipstream.bridge.model.spec import ModelSpec


class Family(Protocol):
    """A module with these two functions, or an object with these two methods.

    They are called in the driver, on every trainer rank, and by commands, without torch and without files.
    """

    def geometry(self, hf: HfConfig) -> Geometry:
        """Read a ``config.json``: sizes, attention, rotary embedding, experts. Raises UnsupportedModel for a
        setting that would change the model in a way that is not covered.
        """
        ...

    def mappings(self, geometry: Geometry) -> Mappings:
        """List all parameters of the model: Megatron's name, the HF tensors that it holds, and how ranks
        share it.
        """
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


def model_spec(model_path: Path, own: Mapping[str, Family] | None = None) -> ModelSpec:
    """Read the config of the HF checkpoint directory ``model_path``. Raises UnsupportedModel.

    ``own``: families of the user's by ``model_type``, which come before ours.
    """
    return spec_of(read_config(model_path), Path(model_path), own)


def spec_of(hf: HfConfig, path: Path, own: Mapping[str, Family] | None = None) -> ModelSpec:
    """Return the spec of a config. ``path``: where the weights are; it is not read here."""
    kind, families = hf.get("model_type"), {**FAMILIES, **(own or {})}
    family = families.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UnsupportedModel(
            f"model_type {kind!r} is not mapped; supported: {', '.join(sorted(families))}; for another one, "
            "name a module of yours in model.families (docs/adding_a_model.md)"
        )
    geometry = family.geometry(hf)
    _require_kind(kind, "geometry", geometry, Geometry)
    mappings = family.mappings(geometry)
    _require_kind(kind, "mappings", mappings, Mappings)
    return ModelSpec(path, geometry, mappings)


def _require_kind(kind: object, function: str, returned: object, expected: type) -> None:
    """Raise UnsupportedModel for what a family of the user's must not return."""
    if not isinstance(returned, expected):
        raise UnsupportedModel(
            f"model_type {kind!r}: `{function}` of its family returned "
            f"{type(returned).__name__}, expected {expected.__name__}"
        )
