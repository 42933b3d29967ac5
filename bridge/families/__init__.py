"""The supported model families, by the ``model_type`` of an HF config.

A family is one module: it reads the config and lists the mappings. Those of this package are in ``FAMILIES``;
a recipe names others by import path, in ``model.families`` (docs/adding_a_model.md).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from slipstream.bridge.families import (
    arcee,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    exaone4,
    gemma,
    gemma3_text,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granite,
    interleaved_llama,
    kimi_k2,
    layer_norm_llama,
    llama,
    mimo,
    minimax_m2,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
    qwen3_vl_moe_text,
    seed_oss,
    smollm3,
    solar_open,
    youtu,
)
from slipstream.bridge.families.defaults import with_defaults
from slipstream.bridge.families.missing import EXAMINED, missing_parts
from slipstream.bridge.families.stored import as_stored
from slipstream.bridge.families.text_part import TextPart
from slipstream.bridge.hf.config import HfConfig, UnsupportedModel, read_config
from slipstream.bridge.hf.index import HfCheckpointError, listing
from slipstream.bridge.hf.quantization import quantization_of
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
    "arcee": arcee,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "ernie4_5": interleaved_llama,
    "exaone4": exaone4,
    "gemma": gemma,
    "gemma3": TextPart(
        text=gemma3_text,
        model_types=("gemma3_text",),
        prefixes={"": "language_model."},
        passed_through=("vision_tower.", "multi_modal_projector."),
    ),
    "gemma3_text": gemma3_text,
    "glm": glm4,
    "glm4": glm4,
    "glm46v": TextPart(text=glm4, model_types=("glm4v_text",)),
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "glm4v": TextPart(text=glm4, model_types=("glm4v_text",)),
    "glm4v_moe": TextPart(text=glm4_moe, model_types=("glm4v_moe_text",)),
    "glm_moe_dsa": deepseek_v32,
    "gpt_oss": gpt_oss,
    "granite": granite,
    "helium": interleaved_llama,
    "kimi_k2": kimi_k2,
    "kimi_k25": TextPart(
        text=kimi_k2,
        model_types=("kimi_k2", "deepseek_v3"),
        prefixes={"": "language_model."},
        passed_through=("vision_tower.", "mm_projector."),
    ),
    "llama": llama,
    "mimo": mimo,
    "minimax_m2": minimax_m2,
    "mistral": mistral,
    "mistral3": TextPart(
        text=mistral,
        model_types=("mistral",),
        prefixes={"": "language_model."},
        passed_through=("vision_tower.", "multi_modal_projector."),
    ),
    "mixtral": mixtral,
    "nemotron": layer_norm_llama,
    "olmo2": olmo2,
    "olmoe": olmoe,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_5_vl": TextPart(
        text=qwen2,
        model_types=("qwen2_5_vl_text", "qwen2_5_vl"),
        prefixes={},
        passed_through=("visual.",),
    ),
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_5": TextPart(text=qwen3_5_text, model_types=("qwen3_5_text",)),
    "qwen3_5_moe": TextPart(text=qwen3_5_text, model_types=("qwen3_5_moe_text",)),
    "qwen3_5_moe_text": qwen3_5_text,
    "qwen3_5_text": qwen3_5_text,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_vl": TextPart(text=qwen3, model_types=("qwen3_vl_text",)),
    "qwen3_vl_moe": TextPart(text=qwen3_vl_moe_text, model_types=("qwen3_vl_moe_text",)),
    "seed_oss": seed_oss,
    "smollm3": smollm3,
    "solar_open": solar_open,
    "stablelm": layer_norm_llama,
    "youtu": youtu,
}


def model_spec(model_path: Path, own: Mapping[str, Family] | None = None) -> ModelSpec:
    """Read the config of the HF checkpoint directory ``model_path``, and the names of its tensors.

    Raises UnsupportedModel. ``own``: families of the user's by ``model_type``, which come before ours.
    """
    hf, path = read_config(model_path), Path(model_path)
    spec, family = _spec_and_family(hf, path, own)
    try:
        found = listing(path)
    except (HfCheckpointError, OSError):  # a config alone, or files that ``check_tensors`` refuses
        return _as_published(spec)
    return as_stored(spec, hf, family, found)


def spec_of(hf: HfConfig, path: Path, own: Mapping[str, Family] | None = None) -> ModelSpec:
    """Return the spec of a config alone. ``path``: where the weights are; it is not read here."""
    spec, _ = _spec_and_family(hf, path, own)
    return _as_published(spec)


def _as_published(spec: ModelSpec) -> ModelSpec:
    """Return a spec whose experts are stored in the form in which the family is published."""
    return replace(spec, mappings=spec.mappings.with_experts_of({}))


def _spec_and_family(hf: HfConfig, path: Path, own: Mapping[str, Family] | None) -> tuple[ModelSpec, Family]:
    kind, families = hf.get("model_type"), {**FAMILIES, **(own or {})}
    family = families.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UnsupportedModel(_not_mapped(kind, missing_parts(hf), families))
    try:
        geometry = family.geometry(with_defaults(hf))
    except UnsupportedModel as error:
        # A family names the first. What a family of the user's covers is not known here.
        if family is FAMILIES.get(str(kind)) and len(parts := missing_parts(hf)) > 1:
            raise UnsupportedModel(f"{error}; all that is not covered: {'; '.join(parts)}") from None
        raise
    _require_kind(kind, "geometry", geometry, Geometry)
    mappings = family.mappings(geometry)
    _require_kind(kind, "mappings", mappings, Mappings)
    return ModelSpec(path, geometry, mappings, quantization=quantization_of(hf)), family


def _not_mapped(kind: object, parts: Sequence[str], families: Iterable[str]) -> str:
    """Return what is missing for a model, if anything is: a module of the user's would need it too."""
    supported = ", ".join(sorted(families))
    if kind not in EXAMINED:
        shown = f" (its settings show {'; '.join(parts)})" if parts else ""
        return (
            f"model_type {kind!r} is not mapped, and was not examined: it is not known what the bridge and "
            f"Megatron lack here{shown}; supported: {supported}; compare its code with "
            "docs/adding_a_model.md part by part, then name a module of yours in model.families"
        )
    if parts:
        return (
            f"model_type {kind!r} is not mapped; the bridge and Megatron lack here: {'; '.join(parts)}; "
            f"supported: {supported} (docs/families.md)"
        )
    return (
        f"model_type {kind!r} is not mapped; supported: {supported}; for another one, "
        "name a module of yours in model.families (docs/adding_a_model.md)"
    )


def _require_kind(kind: object, function: str, returned: object, expected: type) -> None:
    """Raise UnsupportedModel for what a family of the user's must not return."""
    if not isinstance(returned, expected):
        raise UnsupportedModel(
            f"model_type {kind!r}: `{function}` of its family returned "
            f"{type(returned).__name__}, expected {expected.__name__}"
        )
