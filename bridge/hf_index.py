"""Which tensors an HF checkpoint holds, from its index and the headers of its files. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

LONGEST_HEADER = 100_000_000
"""What safetensors itself permits."""

SPELLINGS = {"float32": "F32", "bfloat16": "BF16"}
"""Of the dtypes that are written: torch's, and that of safetensors."""
ITEMSIZE = {"float32": 4, "bfloat16": 2}

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and every implementation recomputes."""


class HfCheckpointError(ValueError):
    """The checkpoint and the model do not fit together; the message lists the names."""


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it: BF16, F32, ..."""


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """By name. Raises HfCheckpointError for files that are missing, cut off or no safetensors."""
    return {
        name: StoredTensor(file, tuple(about["shape"]), about["dtype"])
        for file in _files(path)
        for name, about in _header(file).items()
        if name != "__metadata__" and not name.endswith(_IGNORED_SUFFIXES)
    }


def _files(path: Path) -> list[Path]:
    index, single = path / INDEX, path / SINGLE
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            raise HfCheckpointError(f"{index} is no index of safetensors files: {error!r}") from error
        if absent := sorted(name for name in names if not (path / name).exists()):
            raise HfCheckpointError(f"{path} lacks files that its index names: {', '.join(absent)}")
        return [path / name for name in sorted(names)]
    if single.exists():
        return [single]
    raise HfCheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}")


def _header(file: Path) -> dict[str, Any]:
    """The names, shapes and places of a file's tensors."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(LONGEST_HEADER, size - 8):
            raise HfCheckpointError(f"{file} cannot be read: {size} bytes, with a header of {length}")
        try:
            header = json.loads(opened.read(length))
            ends = [about["data_offsets"][1] for name, about in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HfCheckpointError(
                f"{file} cannot be read, its header is no safetensors': {error}"
            ) from error
    if 8 + length + max(ends, default=0) != size:
        raise HfCheckpointError(
            f"{file} cannot be read, perhaps it is cut off: {size} bytes, its header promises "
            f"{8 + length + max(ends, default=0)}"
        )
    return header
