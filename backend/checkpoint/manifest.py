"""``checkpoint.json``: which state a checkpoint holds, and the size and checksum of each of its files."""

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.rollout.ledger.rows.watermark import Watermark
from slipstream.rollout.system.disk import describe
from slipstream.rollout.system.durable import write_durably

CHUNK = 2**24
"""Bytes per read."""


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def synced_checksum(path: Path) -> int:
    """Wait until a file is on disk, and return its CRC-32."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return checksum(path)


MANIFEST = "checkpoint.json"
FORMAT = 2
READERS = 4
"""Files that are checksummed at once; a single reader does not fill a parallel file system's bandwidth."""


@dataclass(frozen=True)
class CheckpointRecord:
    """The state of the run at which the weights of a checkpoint were taken."""

    version: int
    step: int
    epoch: int
    """Epoch of the run, counted from 0."""
    data_position: int
    """Prompts that had been drawn from the prompt set."""
    counts: dict[str, int]
    """Numbers of groups, by state."""
    ledger: Watermark | None = None
    """How far the ledger was; None in a run without a ledger."""
    feedback: Mapping[str, object] | None = None
    """Measurements of earlier steps for later ones: ``Feedback.state``; None in a supervised run."""


class ListedFile(TypedDict):
    """One file of a checkpoint."""

    name: str
    """Path within the checkpoint's folder."""
    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    record: CheckpointRecord
    files: Sequence[ListedFile]


class BadManifest(Exception):
    """A manifest is missing, damaged or of another format; the message says which."""


def write_manifest(folder: Path, record: CheckpointRecord) -> None:
    """Describe ``record`` and all files in ``folder``, once each of them is on disk.

    Raises CheckpointError if there are none.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    if not files:
        raise CheckpointError(f"{folder} holds no file: nothing was written into it")
    with ThreadPoolExecutor(READERS) as pool:
        checksums = list(pool.map(synced_checksum, files))
    listed = [
        ListedFile(name=path.relative_to(folder).as_posix(), size=path.stat().st_size, crc32=crc32)
        for path, crc32 in zip(files, checksums, strict=True)
    ]
    content: dict[str, object] = {"format": FORMAT, **asdict(record), "files": listed}
    write_durably(folder / MANIFEST, json.dumps(content | {"crc32": _own_checksum(content)}, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint and check it against its own checksum. Raises BadManifest."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        crc32 = content.pop("crc32")
    except FileNotFoundError:
        raise BadManifest(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise BadManifest(f"{MANIFEST} cannot be read: {describe(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadManifest(f"{MANIFEST} cannot be understood") from None
    if crc32 != _own_checksum(content):
        raise BadManifest(f"{MANIFEST} has a wrong checksum")
    if content["format"] != FORMAT:
        raise BadManifest(f"{MANIFEST} has format {content['format']}; this program reads {FORMAT}")
    record = {name: content[name] for name in CheckpointRecord.__dataclass_fields__}
    if record["ledger"] is not None:
        record["ledger"] = Watermark(**record["ledger"])
    return Manifest(CheckpointRecord(**record), content["files"])


def record_digest(record: CheckpointRecord) -> str:
    """Return a digest that tells the records of checkpoints apart."""
    return hashlib.blake2b(json.dumps(asdict(record), sort_keys=True).encode(), digest_size=16).hexdigest()


def problems_of(folder: Path, *, checksums: bool) -> list[str]:
    """Return what is wrong with a checkpoint; empty if it is as it was written.

    checksums: read every byte; otherwise compare only the sizes of the files.
    """
    try:
        manifest = read_manifest(folder)
    except BadManifest as error:
        return [str(error)]

    def problem_of(listed: ListedFile) -> str | None:
        return _problem(folder / listed["name"], listed, checksums)

    with ThreadPoolExecutor(READERS) as pool:
        return [problem for problem in pool.map(problem_of, manifest.files) if problem]


def _problem(path: Path, listed: ListedFile, checksums: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != listed["size"]:
            return f"{listed['name']} has {size} bytes instead of {listed['size']}"
        if checksums and checksum(path) != listed["crc32"]:
            return f"{listed['name']} has a wrong checksum"
    except FileNotFoundError:
        return f"{listed['name']} is missing"
    except OSError as error:
        return f"{listed['name']} cannot be read: {describe(error)}"
    return None


def _own_checksum(content: dict[str, object]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
