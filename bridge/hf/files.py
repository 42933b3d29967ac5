"""Read single tensors from an HF checkpoint directory, and write a whole one bucket by bucket."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  # bare os.PathLike
from torch import Tensor

from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.index import INDEX, HfCheckpointError, StoredTensor


class _OpenFile(Protocol):
    """The part of safetensors' file handle that is used here."""

    def get_tensor(self, name: str) -> Tensor: ...


class HFCheckpoint:
    """The tensors of a checkpoint directory. Files are memory-mapped: only what is copied is read."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        """``stored``: the result of ``hf.index.stored_tensors``."""
        self._stored = stored
        self._stack = ExitStack()
        self._opened: dict[Path, _OpenFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        """Return a view into the file, valid while the checkpoint is open. Raises HfCheckpointError."""
        file = self._stored[name].file
        if file not in self._opened:
            try:
                self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            except SafetensorError as error:
                raise HfCheckpointError(f"{file} cannot be read: {error}") from error
        return self._opened[file].get_tensor(name)


_SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)
"""Files of a checkpoint besides its weights."""


def write_hf(buckets: Iterator[FlatBucket | None], source: Path, folder: Path) -> int:
    """Write exported buckets as an HF checkpoint directory, with the config and tokenizer of ``source``.

    Each bucket becomes one safetensors file. The directory is made under a temporary name and renamed when
    it is complete and on disk. A rank that is not the sender gets no buckets and writes nothing; it iterates
    so that its shards are sent. Returns the bytes of the tensors; 0 on such a rank.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    dtype = None
    weight_map: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(buckets, start=1):
        if bucket is None:
            continue
        if not weight_map:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        file = f"model-{number:05d}.safetensors"
        save_file(
            {name: t.contiguous().cpu() for name, t in bucket.tensors()}, partial / file, {"format": "pt"}
        )
        weight_map.update(dict.fromkeys(bucket.names, file))
        total += bucket.flat.nbytes
        dtype = dtype or bucket.flat.dtype
    if dtype is None:
        return 0
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (partial / INDEX).write_text(json.dumps(index, indent=2))
    for pattern in _SIDE_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, partial / file.name)  # with the permissions of new files, not its own
    _state_dtype(partial / "config.json", dtype)
    for path in (*partial.iterdir(), partial):
        _sync(path)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    _sync(folder.parent)
    return total


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _state_dtype(config: Path, dtype: torch.dtype) -> None:
    """Write the dtype of the weights into the config: a program that is given none uses the config's."""
    hf = json.loads(config.read_text())
    spelling = "dtype" if "dtype" in hf else "torch_dtype"
    config.write_text(json.dumps(hf | {spelling: str(dtype).removeprefix("torch.")}, indent=2) + "\n")
