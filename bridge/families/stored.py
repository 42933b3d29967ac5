"""What the files of a checkpoint say of its model beyond its config: a head of its own, stacked experts.

Both are told by the names of tensors. A config may be wrong about the head: transformers 5 writes the default
of a class for a model that reads more than text, whatever that of its language model is.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from slipstream.bridge.hf.config import HfConfig
from slipstream.bridge.hf.index import Listing, StoredTensor, same_values
from slipstream.bridge.hf.kept import TIED
from slipstream.bridge.hf.quantization import QuantizedTensor, join_parts
from slipstream.bridge.model.mapping import OUTPUT
from slipstream.bridge.model.spec import ModelSpec

if TYPE_CHECKING:
    from slipstream.bridge.families import Family


def as_stored(spec: ModelSpec, hf: HfConfig, family: "Family", found: Listing) -> ModelSpec:
    """Return the spec of the model that the files hold, by ``spec``, which is that of its config alone.

    The head is tied if the files lack it, or have the embedding's values in it while the config says that it
    is tied.
    """
    tensors, _ = join_parts(found.tensors, spec.quantization)
    extra = any(name.startswith(spec.extra_prefixes) for name in tensors)
    spec = replace(spec, notes=found.notes, stores_extra_layers=extra)
    untied = family.mappings(replace(spec.geometry, tied_embeddings=False))
    heads = [mapping.hf[0] for mapping in untied.head if mapping.megatron == OUTPUT]
    if heads:
        [head], [words] = heads, untied.embedding[0].hf
        spec = _with_head(spec, hf, family, tensors, head, words)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return replace(spec, mappings=spec.mappings.with_experts_of(shapes))


def _with_head(
    spec: ModelSpec, hf: HfConfig, family: "Family", tensors: dict[str, StoredTensor], head: str, words: str
) -> ModelSpec:
    stated = _stated(hf)
    if head not in tensors:
        tied, found = spec.geometry.tied_embeddings or True in stated.values(), f"there is no {head}"
    elif spec.geometry.tied_embeddings and _equal(tensors, head, words):
        tied, found = True, f"{head} has the values of {words}"
        spec = replace(spec, tied_head=(head, words))
    else:
        tied, found = False, f"{head} has values of its own"
    if tied != spec.geometry.tied_embeddings:
        geometry = replace(spec.geometry, tied_embeddings=tied)
        spec = replace(spec, geometry=geometry, mappings=family.mappings(geometry))
    wrong = [level for level, value in stated.items() if value is not tied]
    if not wrong or (head not in tensors and not tied):  # without a head, ``check_tensors`` refuses it
        return spec
    note = (
        f"config.json says {' and '.join(f'{level}: {str(stated[level]).lower()}' for level in wrong)}, and "
        f"in the files {found}: the head is taken as {'tied' if tied else 'not tied'}, and exports say so"
    )
    return replace(spec, corrects_tie=True, notes=(*spec.notes, note))


def _stated(hf: HfConfig) -> dict[str, bool]:
    """Return what each level of a config says of tied embeddings."""
    text = hf.get("text_config")
    levels = {TIED: hf}
    if isinstance(text, dict):
        levels[f"text_config.{TIED}"] = cast("HfConfig", text)
    return {name: bool(level[TIED]) for name, level in levels.items() if level.get(TIED) is not None}


def _equal(tensors: dict[str, StoredTensor], head: str, words: str) -> bool:
    pair = tensors[head], tensors.get(words)
    if pair[1] is None or any(isinstance(tensor, QuantizedTensor) for tensor in pair):
        return False
    return same_values(pair[0], head, pair[1], words)
