"""Load the parameters of one rank from HF safetensors; each rank reads only its own slices."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.bridge.hf.files import HFCheckpoint
from slipstream.bridge.hf.index import HfCheckpointError
from slipstream.bridge.model.layout import Layout, UnevenSplit
from slipstream.bridge.model.mapping import copy_in
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.check import check_tensors
from slipstream.bridge.shards.plan import entries_of, pieces_of


@torch.no_grad()
def load_hf(spec: ModelSpec, layout: Layout, rank: int, parameters: Sequence[Mapping[str, Tensor]]) -> None:
    """Fill ``parameters`` (one mapping by name per model chunk of ``rank``) from the checkpoint of ``spec``.

    Raises HfCheckpointError unless every parameter is filled exactly once and every tensor is used. An
    optional parameter that the checkpoint lacks keeps its value.
    """
    unfilled = [dict(chunk) for chunk in parameters]
    stored = check_tensors(spec)
    with HFCheckpoint(stored) as checkpoint:
        for entry, shard in entries_of(spec, layout, rank):
            target = unfilled[entry.chunk].pop(entry.parameter, None)
            if target is None:
                raise HfCheckpointError(f"the Megatron model has no parameter {entry.parameter!r}")
            try:
                pieces = pieces_of(entry.split, shard)
            except UnevenSplit as error:
                raise HfCheckpointError(f"{entry.parameter}: {error}") from None
            expected = entry.split.shard_shape(shard.size)
            if target.shape != expected:
                raise HfCheckpointError(
                    f"{entry.parameter}: {expected} expected, Megatron has {tuple(target.shape)}"
                )
            if entry.mapping.optional and not stored.keys() >= set(entry.hf_names):
                continue
            expert = None if entry.stacked is None else entry.stacked[0]
            sources = [checkpoint.tensor(name, expert) for name in entry.hf_names]
            copy_in(target, sources, pieces)
    if unmapped := sorted(name for chunk in unfilled for name in chunk):
        raise HfCheckpointError(f"no HF tensor is mapped to: {', '.join(unmapped)}")
