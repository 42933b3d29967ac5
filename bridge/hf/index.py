"""List the tensors of an HF checkpoint from its index and the headers of its files. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

LONGEST_HEADER = 100_000_000
"""Limit on the bytes of a header, from safetensors itself."""

SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
"""Safetensors' name of each dtype that is written, by torch's name."""
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
"""Bytes per element, by torch's name of the dtype."""

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints hold and every implementation computes again."""


class HfCheckpointError(ValueError):
    """The checkpoint and the model do not fit together; the message lists the names."""


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """Safetensors' name: BF16, F32, ..."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    """File of each tensor."""


class _Header(msgspec.Struct):
    """The header's entry for one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """First byte and end, counted from the end of the header."""


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name.

    Raises HfCheckpointError for a file that is missing, truncated or not in the safetensors format.
    """
    return {
        name: tensor
        for file in _files(path)
        for name, tensor in tensors_in(file).items()
        if not name.endswith(_IGNORED_SUFFIXES)
    }


def tensors_in(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file by name. Raises HfCheckpointError as ``stored_tensors``."""
    return {name: StoredTensor(file, header.shape, header.dtype) for name, header in _headers(file).items()}


def _files(path: Path) -> list[Path]:
    index, single = path / INDEX, path / SINGLE
    if index.exists():
        try:
            names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise HfCheckpointError(f"{index} is no index of safetensors files: {error}") from error
        if absent := sorted(name for name in names if not (path / name).exists()):
            raise HfCheckpointError(f"{path} lacks files that its index names: {', '.join(absent)}")
        return [path / name for name in sorted(names)]
    if single.exists():
        return [single]
    raise HfCheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}")


def _headers(file: Path) -> dict[str, _Header]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(LONGEST_HEADER, size - 8):
            raise HfCheckpointError(
                f"{file} cannot be read: it has {size} bytes and claims a header of {length} bytes"
            )
        content = opened.read(length)
    try:
        entries = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        headers = {name: msgspec.json.decode(entry, type=_Header) for name, entry in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HfCheckpointError(f"{file} cannot be read: its header is not safetensors': {error}") from error
    expected = 8 + length + max((header.data_offsets[1] for header in headers.values()), default=0)
    if size != expected:
        raise HfCheckpointError(
            f"{file} cannot be read: it has {size} bytes and its header announces {expected}; "
            "it may be truncated"
        )
    return headers
