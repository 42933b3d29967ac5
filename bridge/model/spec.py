"""An HF checkpoint directory with the geometry and the mappings of its model. Imports no torch."""

from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.bridge.hf.kept import Kept
from slipstream.bridge.hf.quantization import Quantization
from slipstream.bridge.model.geometry import Geometry
from slipstream.bridge.model.mapping import OUTPUT, Mapping, Mappings, Whole


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
    tied_head: tuple[str, str] | None = None
    """Name of a head that the checkpoint stores although it is tied, and that of the embedding."""
    corrects_tie: bool = False
    """The config says of tied embeddings what the checkpoint's files do not bear out."""
    stores_extra_layers: bool = False
    """The checkpoint has layers for multi-token prediction."""
    notes: tuple[str, ...] = ()
    """In what config, index and files of the checkpoint disagree, and what was made of it."""

    @property
    def extra_prefixes(self) -> tuple[str, ...]:
        """Return the prefixes of the HF names of layers for multi-token prediction. They are not mapped."""
        geometry = self.geometry
        layers, _, _ = self.mappings.layers[0][0].hf[0].partition("{layer}")
        numbers = range(geometry.n_layers, geometry.n_layers + geometry.extra_layers)
        apart = (geometry.extra_prefix,) if geometry.extra_prefix else ()
        return (*apart, *(f"{layers}{number}." for number in numbers))

    @property
    def kept(self) -> Kept:
        """Return what an export takes over from the checkpoint."""
        extra = self.extra_prefixes if self.stores_extra_layers else ()
        tied = self.geometry.tied_embeddings if self.corrects_tie else None
        return Kept((*self.mappings.passed_through, *extra), self.tied_head, tied)


def value_spec(spec: ModelSpec) -> ModelSpec:
    """Return the same decoder with a head of one value per token.

    The head is that of HF's sequence classification with one label; a language model's checkpoint lacks it.
    """
    geometry = replace(spec.geometry, tied_embeddings=False)
    final_norm = spec.mappings.head[0]
    value = Mapping(OUTPUT, ("score.weight",), Whole((1, geometry.hidden)), optional=True)
    mappings = replace(spec.mappings, head=(final_norm, value))
    return replace(
        spec,
        geometry=geometry,
        mappings=mappings,
        gives_values=True,
        tied_head=None,
        corrects_tie=False,
        stores_extra_layers=False,
    )
