"""HF safetensors -> the parameters of this rank, each rank reading only its own slices."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bridge.families import ModelSpec
from bridge.layout import Layout, Shard, UnevenSplit
from bridge.mapping import Slices
from bridge.plan import Entry, stage_entries

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and every implementation recomputes."""


class CheckpointError(ValueError):
    """The checkpoint and the model do not fit together; the message lists the names."""


class HFCheckpoint:
    """Lazy access to the tensors of an HF checkpoint directory: one file, or many with an index."""

    def __init__(self, path: Path) -> None:
        self._stack = ExitStack()
        index, single = path / "model.safetensors.index.json", path / "model.safetensors"
        if index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif single.exists():
            files = [single.name]
        else:
            raise CheckpointError(f"{path} holds neither model.safetensors nor model.safetensors.index.json")
        if absent := [file for file in files if not (path / file).exists()]:
            raise CheckpointError(f"{path} lacks files that its index names: {', '.join(absent)}")
        self._file_of = {}
        for file in files:
            try:
                handle = self._stack.enter_context(safe_open(path / file, framework="pt"))
            except SafetensorError as error:
                self._stack.close()
                raise CheckpointError(
                    f"{path / file} cannot be read, perhaps it is cut off: {error}"
                ) from error
            self._file_of.update(dict.fromkeys(handle.keys(), handle))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        return {name for name in self._file_of if not name.endswith(_IGNORED_SUFFIXES)}

    def slices(self, name: str) -> Slices:
        """Part-wise access to one tensor. Raises CheckpointError when it is missing."""
        if name not in self._file_of:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        return self._file_of[name].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())


def check_names(spec: ModelSpec, checkpoint: HFCheckpoint) -> None:
    """Every tensor of the checkpoint is mapped once, with the expected shape. Raises CheckpointError."""
    whole = Layout()
    expected: dict[str, tuple[int, ...]] = {}
    for entry in stage_entries(spec, whole, 0):
        expected.update(zip(entry.hf_names, entry.hf_shapes, strict=True))
    found = checkpoint.names()
    if spec.geometry.tied_embeddings:
        found = found - {"lm_head.weight"}
    problems = [f"missing: {name}" for name in sorted(expected.keys() - found)]
    problems += [f"not mapped: {name}" for name in sorted(found - expected.keys())]
    problems += [
        f"{name} has shape {checkpoint.shape(name)}, config.json means {shape}"
        for name, shape in expected.items()
        if name in found and checkpoint.shape(name) != shape
    ]
    if problems:
        raise CheckpointError(f"{spec.path} does not fit its config.json:\n  " + "\n  ".join(problems))


def parameters_to_load(spec: ModelSpec, layout: Layout, stage: int) -> Iterator[Entry]:
    """The entries of a stage, and the last stage's own copy of a tied embedding."""
    yield from stage_entries(spec, layout, stage)
    last = layout.pipeline - 1
    if spec.geometry.tied_embeddings and stage == last > 0:
        embedding = spec.mappings.embedding[0]
        shapes = embedding.hf_shapes(spec.geometry)
        yield Entry(embedding, stage, "output_layer.weight", embedding.hf, shapes)


@torch.no_grad()
def load_hf(
    spec: ModelSpec, layout: Layout, stage: int, tensor_rank: int, parameters: dict[str, Tensor]
) -> None:
    """Fill ``parameters`` (name -> this rank's Megatron parameter) from the checkpoint at ``spec.path``.

    Raises CheckpointError unless every parameter is filled exactly once and every tensor is used.
    """
    shard = Shard(tensor_rank, layout.tensor)
    unfilled = dict(parameters)
    with HFCheckpoint(spec.path) as checkpoint:
        check_names(spec, checkpoint)
        for entry in parameters_to_load(spec, layout, stage):
            target = unfilled.pop(entry.parameter, None)
            if target is None:
                raise CheckpointError(f"the Megatron model has no parameter {entry.parameter!r}")
            sources = [checkpoint.slices(name) for name in entry.hf_names]
            try:
                value = entry.mapping.read(sources, spec.geometry, shard)
            except UnevenSplit as error:
                raise CheckpointError(f"{entry.parameter}: {error}") from None
            if value.shape != target.shape:
                raise CheckpointError(
                    f"{entry.parameter}: {tuple(value.shape)} read, {tuple(target.shape)} expected"
                )
            target.copy_(value)
    if unfilled:
        raise CheckpointError(f"no HF tensor is mapped to: {', '.join(sorted(unfilled))}")
