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
from slipstream.bridge.hf.config import read_config
from slipstream.bridge.hf.index import INDEX, HfCheckpointError, StoredTensor, stored_tensors
from slipstream.bridge.hf.kept import NOTHING_KEPT, Kept
from slipstream.bridge.hf.quantization import (
    OLD_SETTING,
    SETTING,
    BlockFp8,
    QuantizedTensor,
    StackedMxfp4,
    join_parts,
    quantization_of,
)
from slipstream.bridge.hf.quantized import dequantized_fp8, dequantized_int4, dequantized_mxfp4


class _OpenFile(Protocol):
    """The part of safetensors' file handle that is used here."""

    def get_tensor(self, name: str) -> Tensor: ...


class HFCheckpoint:
    """The tensors of a checkpoint directory. Files are memory-mapped: only what is copied is read."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        """``stored``: the tensors by name, with a QuantizedTensor for each quantized weight."""
        self._stored = stored
        self._stack = ExitStack()
        self._opened: dict[Path, _OpenFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def tensor(self, name: str, expert: int | None = None) -> Tensor:
        """Return a view into the file, valid while the checkpoint is open; a quantized weight is dequantized.

        ``expert``: the part of this expert, of a tensor that stacks experts. Raises HfCheckpointError.
        """
        stored = self._stored[name]
        if not isinstance(stored, QuantizedTensor):
            tensor = self._read(name, stored.file)
            return tensor if expert is None else tensor[expert]
        if isinstance(stored.quantization, StackedMxfp4):
            experts = range(stored.shape[0]) if expert is None else (expert,)
            blocks, scales = (self._read(part, tensor.file) for part, tensor in stored.parts)
            weights = [dequantized_mxfp4(blocks[number], scales[number]) for number in experts]
            return weights[0] if expert is not None else torch.stack(weights)
        values, scale, *shape = (self._read(part, tensor.file) for part, tensor in stored.parts)
        if isinstance(stored.quantization, BlockFp8):
            return dequantized_fp8(values, scale, stored.quantization.block)
        if (written := tuple(int(size) for size in shape[0])) != stored.shape:
            raise HfCheckpointError(
                f"{stored.parts[2][0]} is {written}, and the scales are those of {stored.shape}"
            )
        return dequantized_int4(values, scale, stored.shape[1])

    def _read(self, name: str, file: Path) -> Tensor:
        if file not in self._opened:
            try:
                self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            except SafetensorError as error:
                raise HfCheckpointError(f"{file} cannot be read: {error}") from error
        return self._opened[file].get_tensor(name)


_WEIGHTS = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf"),
    *(".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".distcp"),
    "adapter_config.json",  # without its weights, transformers would look for them
    *("hf_quant_config.json", "quant_config.json", "quantize_config.json"),
)
"""Endings of the names of weights, and of configs that describe weights which an export does not have."""

FILE_BYTES = 1 << 30
"""A file of tensors that are copied is written when they have this many bytes."""


def write_hf(
    buckets: Iterator[FlatBucket | None],
    source: Path,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    quantization: Mapping[str, object] | None = None,
    kept: Kept = NOTHING_KEPT,
) -> int:
    """Write exported buckets as an HF checkpoint directory, with all files of ``source`` but its weights.

    ``dtype``: of the unquantized weights; None: that of the first bucket. ``quantization``: the config's
    ``quantization_config``, whatever that of ``source`` is; None: the weights are not quantized.

    Each bucket becomes one safetensors file. The tensors of ``source`` that are passed through (``kept``)
    become another. The directory is made under a temporary name and renamed when it is complete and on disk.
    A rank that is not the sender gets no buckets and writes nothing; it iterates so that its shards are sent.
    Returns the bytes of the tensors; 0 on such a rank.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    weight_map: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(buckets, start=1):
        if bucket is None:
            continue
        if not weight_map:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        file = f"model-{number:05d}.safetensors"
        tensors = {name: t.contiguous().cpu() for name, t in bucket.tensors()}
        if kept.tied_head is not None and kept.tied_head[1] in tensors:
            head, words = kept.tied_head
            tensors[head] = tensors[words].clone()  # safetensors refuses tensors that share memory
        save_file(tensors, partial / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
        dtype = dtype or bucket.flat.dtype
    if not weight_map or dtype is None:
        return 0
    if kept.passed_through:
        total += _pass_through(source, kept.passed_through, dtype, partial, weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (partial / INDEX).write_text(json.dumps(index, indent=2))
    _copy_side_files(source, partial)
    _describe_weights(partial / "config.json", dtype, quantization, kept)
    for path in (*partial.rglob("*"), partial):
        sync(path)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    sync(folder.parent)
    return total


def _copy_side_files(source: Path, folder: Path) -> None:
    """Copy what ``source`` has besides weights: configs, tokenizer, code that ``auto_map`` names, folders.

    Hidden folders (of git, and of downloads) and links to folders are left out.
    """
    for path in source.iterdir():
        if path.is_dir():
            if not path.is_symlink() and not path.name.startswith("."):
                _copy_side_files(path, folder / path.name)
        elif path.is_file() and not path.name.endswith(_WEIGHTS):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / path.name)  # with the permissions of new files, not its own


def _pass_through(
    source: Path, prefixes: tuple[str, ...], dtype: torch.dtype, folder: Path, weight_map: dict[str, str]
) -> int:
    """Copy tensors of ``source`` into files of ``folder``, and enter them into ``weight_map``.

    Quantized ones become unquantized ones of ``dtype``, as the trained ones are. Returns their bytes.
    """
    stored, _ = join_parts(stored_tensors(source), quantization_of(read_config(source)))
    stored = {name: tensor for name, tensor in stored.items() if name.startswith(prefixes)}
    total, waiting = 0, dict[str, Tensor]()

    def write() -> int:
        file = f"model-passed-through-{len(set(weight_map.values())):05d}.safetensors"
        save_file(waiting, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(waiting, file))
        size = sum(tensor.nbytes for tensor in waiting.values())
        waiting.clear()
        return size

    with HFCheckpoint(stored) as checkpoint:
        for name, described in stored.items():
            tensor = checkpoint.tensor(name)
            waiting[name] = tensor.to(dtype) if isinstance(described, QuantizedTensor) else tensor
            if sum(tensor.nbytes for tensor in waiting.values()) >= FILE_BYTES:
                total += write()
        return total + write() if waiting else total


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe_weights(
    config: Path, dtype: torch.dtype, quantization: Mapping[str, object] | None, kept: Kept
) -> None:
    """Write the dtype of the weights, their quantization and whether the head is tied into the config.

    A program that is given no dtype uses the config's.
    """
    hf, name = json.loads(config.read_text()), str(dtype).removeprefix("torch.")
    hf["dtype" if "dtype" in hf else "torch_dtype"] = name
    language: dict[str, object] = hf.get("text_config") or {}
    for each in (hf, language):
        each.pop(SETTING, None)
        each.pop(OLD_SETTING, None)
        each.update({spelling: name for spelling in ("dtype", "torch_dtype") if spelling in each})
    if quantization is not None:
        hf[SETTING] = quantization
    kept.correct(hf)
    config.write_text(json.dumps(hf, indent=2) + "\n")
