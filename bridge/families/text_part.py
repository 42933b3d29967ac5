"""Language models inside of models that take more than text. The language model is trained, the rest is kept.

config.json   ``text_config`` describes the language model
tensors       those of the language model have a prefix; those of other parts are passed through
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from slipstream.bridge.families.defaults import with_defaults
from slipstream.bridge.hf.config import HfConfig, UnsupportedModel, section
from slipstream.bridge.hf.kept import TIED
from slipstream.bridge.model.geometry import Geometry
from slipstream.bridge.model.mapping import Mappings

if TYPE_CHECKING:
    from slipstream.bridge.families import Family


@dataclass(frozen=True)
class TextPart:
    """The family of a model whose language model is of another family.

    Trajectories are text, so gradients reach the language model only.
    """

    text: "Family"
    model_types: tuple[str, ...]
    """``model_type`` of the ``text_config`` in its checkpoints. A config without that section describes the
    language model itself, if the type of the whole model is one of these."""
    prefixes: Mapping[str, str] = field(default_factory=lambda: {"model.": "model.language_model."})
    """Beginning of the language model's names here, by their beginning in the text family. By default it is
    that of most published models."""
    passed_through: tuple[str, ...] = ("model.visual.",)
    """Prefixes of the names of all other tensors."""

    def geometry(self, hf: HfConfig) -> Geometry:
        kind = hf["model_type"]
        flat = "text_config" not in hf and kind in self.model_types
        text = hf if flat else section(hf, "text_config")
        if text.get("model_type") not in self.model_types:
            raise UnsupportedModel(
                f"{kind}: a language model of model_type {text.get('model_type')!r} (text_config) is not "
                f"mapped, expected {' or '.join(self.model_types)}"
            )
        stated = hf.get(TIED)
        tied = text.get(TIED) if stated is None else stated
        head: HfConfig = {} if tied is None else {TIED: tied}
        return replace(self.text.geometry({**with_defaults(text), **head}), family=str(kind))

    def mappings(self, geometry: Geometry) -> Mappings:
        mappings = self.text.mappings(geometry).renamed(self._name)
        return replace(mappings, passed_through=self.passed_through)

    def _name(self, name: str) -> str:
        for old, new in self.prefixes.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name
