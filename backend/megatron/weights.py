"""The model's weights in Megatron's distributed checkpoints.

In the files they have the names that Megatron-Core gives them, whatever the layout: a checkpoint of a run,
one converted from HF weights and one of Megatron-LM are read alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slipstream.backend.megatron.groups import groups
from slipstream.bridge.model.geometry import Geometry

WORDS = "embedding.word_embeddings.weight"
"""A weight that every language model has."""

ADAPTERS = "actor.lora"
"""The entry of a checkpoint's content with the settings of its adapters."""

_EXTRA_STATE = "_extra_state"

_MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.")
"""Prefixes of the names of weights; the optimizer's state has others."""


def content_of(geometry: Geometry, dtype: torch.dtype) -> dict[str, object]:
    """Return the description of a model that its checkpoints carry."""
    return {**asdict(geometry), "dtype": str(dtype)}


def differences(here: Mapping[str, object], there: Mapping[str, object]) -> list[str]:
    """Return the points in which the content of a checkpoint (there) is not that of the model (here)."""
    return [
        f"{name} is {there.get(name)!r} there and {value!r} here"
        for name, value in here.items()
        if there.get(name) != value
    ]


@torch.no_grad()
def sharded_weights(parts: Sequence[GPTModel], prefix: str = "") -> dict[str, object]:
    """Return this rank's weights and their places in the whole model. Keys begin with the part's number.

    The state that Transformer Engine would keep of 8-bit training is left out, so that either layer spec can
    load them. ``prefix``: prefix of their names in the files, if a checkpoint holds several models.
    """
    replicas = groups.get_data_parallel_group(with_context_parallel=True)
    return {
        f"{number}.{name}": value
        for number, part in enumerate(parts)
        for name, value in part.sharded_state_dict(prefix, metadata={"dp_cp_group": replicas}).items()
        if _EXTRA_STATE not in name
    }


def take_over(parts: Sequence[GPTModel], loaded: Mapping[str, object], prefix: str = "") -> None:
    """Give the parts the weights that were loaded for their ``sharded_weights``."""
    for number, part in enumerate(parts):
        start = f"{number}.{prefix}"
        weights = {
            name.removeprefix(start): value for name, value in loaded.items() if name.startswith(start)
        }
        keys = part.load_state_dict(weights, strict=False)
        missing = [name for name in keys.missing_keys if _EXTRA_STATE not in name]
        if missing or keys.unexpected_keys:
            raise ValueError(f"missing: {missing}; not in the model: {keys.unexpected_keys}")


def needed_tensors(weights: Mapping[str, object]) -> dict[str, ShardedTensor]:
    """Return the tensors to be loaded for ``sharded_weights``, by their names in the files."""
    sharded, *_ = load_preprocess(dict(weights))
    return {leaf.key: leaf for leaf in nested_values(sharded) if isinstance(leaf, ShardedTensor)}


def stored_tensors(folder: Path) -> dict[str, ShardedTensor]:
    """Return the weights that a checkpoint's index names, without their values."""
    stored = dist_checkpointing.load_tensors_metadata(str(folder))
    return {
        name: tensor
        for name, tensor in stored.items()
        if name.startswith(_MODEL_PREFIXES) and isinstance(tensor, ShardedTensor)
    }


def mismatches(
    needed: Mapping[str, ShardedTensor], stored: Mapping[str, ShardedTensor], vocab: int
) -> list[str]:
    """Return the needed tensors that are not stored, or are stored with another shape or dtype.

    An embedding has more rows than the vocabulary; how many depends on the layout that wrote it.
    """
    problems: list[str] = []
    for name, tensor in needed.items():
        problem = _mismatch(stored[name], tensor, vocab) if name in stored else "missing"
        if problem:
            problems.append(f"{name}: {problem}")
    return problems


def _mismatch(stored: ShardedTensor, needed: ShardedTensor, vocab: int) -> str | None:
    there, here = tuple(stored.global_shape), tuple(needed.global_shape)
    if stored.dtype != needed.dtype:
        return f"{stored.dtype} there, {needed.dtype} here"
    if needed.allow_shape_mismatch:
        fits = there[0] >= vocab and there[1:] == here[1:]
        return None if fits else f"shape {there} there, at least {(vocab, *here[1:])} here"
    return None if there == here else f"shape {there} there, {here} here"


def load_weights(parts: Sequence[GPTModel], weights: dict[str, object], folder: Path) -> None:
    """Fill the parts, whose ``sharded_weights`` are ``weights``, from a checkpoint. Collective."""
    loaded = cast("dict[str, dict[str, Tensor]]", dist_checkpointing.load({"model": weights}, str(folder)))
    take_over(parts, loaded["model"])
