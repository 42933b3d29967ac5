"""List the tensors of an HF checkpoint from its index and the headers of its files. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

LONGEST_HEADER = 100_000_000
"""Limit on the bytes of a header, from safetensors itself."""

SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
"""Safetensors' name of each dtype that is written, by torch's name."""
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
"""Bytes per element, by torch's name of the dtype."""

COMPARED_BYTES = 1 << 20
"""Bytes that are compared at a time. Tensors that differ mostly do so in the first of them."""

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


@dataclass(frozen=True)
class Listing:
    """The tensors of a checkpoint by name, and in what its index and its files disagree."""

    tensors: dict[str, StoredTensor]
    notes: tuple[str, ...]
    """Disagreements that change no value: every program reads the same tensors."""
    problems: tuple[str, ...]
    """Disagreements after which programs would read other values."""


def listing(path: Path) -> Listing:
    """List the files that the index of a checkpoint names, or its single file.

    Raises HfCheckpointError for files that are missing, truncated or not in the safetensors format.
    """
    placed, problems, notes = _placed(path), list[str](), list[str]()
    tensors: dict[str, StoredTensor] = {}
    read = sorted({SINGLE} if placed is None else set(placed.values()))
    for file in read:
        for name, tensor in tensors_in(path / file).items():
            other = tensors.setdefault(name, tensor)
            if other is not tensor:
                both = f"{name} is in {other.file.name} and in {file}"
                if same_values(other, name, tensor, name):
                    notes.append(f"{both}, with the same values")
                    if placed is not None and placed.get(name) == file:
                        tensors[name] = tensor
                else:
                    problems.append(f"{both}, with other values; remove the file that is out of date")
    if placed is not None:
        if absent := sorted(placed.keys() - tensors.keys()):
            notes.append(f"{INDEX} names tensors that none of its files holds: {_some(absent)}")
        listed = tensors.keys() & placed.keys()
        if moved := sorted(name for name in listed if tensors[name].file.name != placed[name]):
            notes.append(f"{INDEX} names other files for tensors than those that hold them: {_some(moved)}")
        if unlisted := sorted(tensors.keys() - placed.keys()):
            notes.append(f"{INDEX} lacks tensors that its files hold, which are read: {_some(unlisted)}")
        if SINGLE not in read and (path / SINGLE).exists():
            problems.append(
                f"{SINGLE} is beside {INDEX}, which names other files: transformers reads the first, and "
                "SGLang the files of the index; remove the one that is out of date"
            )
    if unread := sorted({file.name for file in path.glob("*.safetensors")} - {*read, SINGLE}):
        reason = f"{INDEX} does not name them" if placed is not None else f"they are beside {SINGLE}"
        notes.append(f"not read, because {reason}: {_some(unread)}")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(_IGNORED_SUFFIXES)}
    return Listing(kept, tuple(notes), tuple(problems))


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name.

    Raises HfCheckpointError as ``listing``, and if its files contradict each other.
    """
    found = listing(path)
    if found.problems:
        raise HfCheckpointError("\n  ".join([f"{path}: its files contradict each other:", *found.problems]))
    return found.tensors


def tensors_in(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file by name. Raises HfCheckpointError as ``listing``."""
    headers, _ = _headers(file)
    return {name: StoredTensor(file, header.shape, header.dtype) for name, header in headers.items()}


def same_values(one: StoredTensor, name: str, other: StoredTensor, other_name: str) -> bool:
    """Return whether two stored tensors have the same dtype, shape and bytes."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return _same_bytes(_Bytes.of(one.file, name), _Bytes.of(other.file, other_name))


class _Bytes(NamedTuple):
    """The place of a tensor in a file of which nothing has been written since."""

    file: Path
    start: int
    length: int
    written_ns: int

    @classmethod
    def of(cls, file: Path, name: str) -> "_Bytes":
        headers, base = _headers(file)
        begin, end = headers[name].data_offsets
        return cls(file, base + begin, end - begin, file.stat().st_mtime_ns)


@lru_cache
def _same_bytes(one: _Bytes, other: _Bytes) -> bool:
    """Compare two tensors, once in a process: equal ones of a large vocabulary are gigabytes to read."""
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        left = one.length
        while left:
            size = min(left, COMPARED_BYTES)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def _placed(path: Path) -> dict[str, str] | None:
    """Return the file of each tensor by the index; None: the checkpoint is a single file."""
    index = path / INDEX
    if not index.exists():
        if (path / SINGLE).exists():
            return None
        raise HfCheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}")
    try:
        placed = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HfCheckpointError(f"{index} is no index of safetensors files: {error}") from error
    if absent := sorted(name for name in set(placed.values()) if not (path / name).exists()):
        raise HfCheckpointError(f"{path} lacks files that its index names: {', '.join(absent)}")
    return placed


def _some(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others.

    >>> _some(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")


def _headers(file: Path) -> tuple[dict[str, _Header], int]:
    """Return the entries for the tensors of a file, and the place at which their bytes begin."""
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
    return headers, 8 + length
