"""The model's weights in Megatron's distributed checkpoints.

In the files they have the names that Megatron-Core gives them, whatever the layout is: a checkpoint of a run,
one that was converted from HF weights and one of Megatron-LM are read alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slipstream.bridge.model.geometry import Geometry

WORDS = "embedding.word_embeddings.weight"
"""Every language model has it."""

ADAPTERS = "actor.lora"
"""The entry of a checkpoint's content with the settings of its adapters."""

_EXTRA_STATE = "_extra_state"

_OF_MODEL = ("embedding.", "decoder.", "output_layer.")
"""How the names of weights begin. Behind other names is the optimizer's state."""


def content_of(geometry: Geometry, dtype: torch.dtype) -> dict[str, Any]:
    """What a checkpoint of a model says about itself."""
    return asdict(geometry) | {"dtype": str(dtype)}


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """In which points the ``content_of`` a checkpoint is not that of the model."""
    return [
        f"{name} is {there.get(name)!r} there and {value!r} here"
        for name, value in here.items()
        if there.get(name) != value
    ]


@torch.no_grad()
def sharded_weights(parts: Sequence[GPTModel], prefix: str = "") -> dict[str, Any]:
    """This rank's weights and their places in the whole model's. The keys begin with the part's number.

    Without what Transformer Engine would remember of 8-bit training, so that either layer spec can load them.
    ``prefix``: of their names in the files, where a checkpoint holds more than one model.
    """
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {
        f"{number}.{name}": value
        for number, part in enumerate(parts)
        for name, value in part.sharded_state_dict(prefix, metadata={"dp_cp_group": replicas}).items()
        if _EXTRA_STATE not in name
    }


def take_over(parts: Sequence[GPTModel], loaded: Mapping[str, Any], prefix: str = "") -> None:
    """Give the parts what was loaded as their ``sharded_weights``."""
    for number, part in enumerate(parts):
        first = f"{number}.{prefix}"
        own = {name: value for name, value in loaded.items() if name.startswith(first)}
        found = part.load_state_dict(
            {name.removeprefix(first): value for name, value in own.items()}, strict=False
        )
        missing = [name for name in found.missing_keys if _EXTRA_STATE not in name]
        if missing or found.unexpected_keys:
            raise ValueError(f"missing: {missing}; not in the model: {found.unexpected_keys}")


def wanted_tensors(weights: Mapping[str, Any]) -> dict[str, ShardedTensor]:
    """What is to be loaded for ``sharded_weights``, by its name in the files."""
    sharded, *_ = load_preprocess(dict(weights))
    return {leaf.key: leaf for leaf in nested_values(sharded) if isinstance(leaf, ShardedTensor)}


def stored_tensors(folder: Path) -> dict[str, ShardedTensor]:
    """The weights that a checkpoint's index names, without their values."""
    stored = dist_checkpointing.load_tensors_metadata(str(folder))
    return {name: tensor for name, tensor in stored.items() if name.startswith(_OF_MODEL)}


def mismatches(
    wanted: Mapping[str, ShardedTensor], stored: Mapping[str, ShardedTensor], vocab: int
) -> list[str]:
    """What is wanted and not stored, or stored with another shape or dtype.

    An embedding has more rows than the vocabulary; how many depends on the layout that it was written in.
    """
    found = []
    for name, tensor in wanted.items():
        problem = _mismatch(stored[name], tensor, vocab) if name in stored else "missing"
        if problem:
            found.append(f"{name}: {problem}")
    return found


def _mismatch(stored: ShardedTensor, wanted: ShardedTensor, vocab: int) -> str | None:
    there, here = tuple(stored.global_shape), tuple(wanted.global_shape)
    if stored.dtype != wanted.dtype:
        return f"{stored.dtype} there, {wanted.dtype} here"
    if wanted.allow_shape_mismatch:
        fits = there[0] >= vocab and there[1:] == here[1:]
        return None if fits else f"shape {there} there, at least {(vocab, *here[1:])} here"
    return None if there == here else f"shape {there} there, {here} here"


def load_weights(parts: Sequence[GPTModel], weights: dict[str, Any], folder: Path) -> None:
    """Fill the parts, of which these are the ``sharded_weights``, from a checkpoint. Collective."""
    loaded: dict[str, Tensor] = dist_checkpointing.load({"model": weights}, str(folder))["model"]
    take_over(parts, loaded)
