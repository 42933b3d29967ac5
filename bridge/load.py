"""HF safetensors -> the parameters of this rank, each rank reading only its own slices."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.bridge.check import check_names
from slipstream.bridge.families import ModelSpec
from slipstream.bridge.hf_files import HFCheckpoint
from slipstream.bridge.hf_index import HfCheckpointError
from slipstream.bridge.layout import Layout, UnevenSplit
from slipstream.bridge.mapping import copy_in
from slipstream.bridge.plan import entries_of, pieces_of


@torch.no_grad()
def load_hf(spec: ModelSpec, layout: Layout, rank: int, parameters: Sequence[Mapping[str, Tensor]]) -> None:
    """Fill ``parameters`` (for each model chunk, this rank's by name) from the checkpoint at ``spec.path``.

    Raises HfCheckpointError unless every parameter is filled exactly once and every tensor is used.
    Optional ones that the checkpoint lacks stay as they are.
    """
    unfilled = [dict(chunk) for chunk in parameters]
    stored = check_names(spec)
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
            copy_in(target, [checkpoint.tensor(name) for name in entry.hf_names], pieces)
    if left := sorted(name for chunk in unfilled for name in chunk):
        raise HfCheckpointError(f"no HF tensor is mapped to: {', '.join(left)}")
