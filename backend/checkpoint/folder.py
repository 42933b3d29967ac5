"""The checkpoints of a run: one folder each, whole or not there.

    v00000008.partial/   begin() made it; the trainer's ranks write into it
    v00000008/           commit(): checksums, checkpoint.json, every file on disk, then one rename
    v00000008.removing/  prune() is deleting it

A kill at any moment leaves one of these names, and only the middle one is ever read. ``checkpoint.json`` is
the last file written and lists all the others with size and checksum, so damage that comes later is found
before it is trained on. The methods block on the disk: call them in a worker thread.
"""

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "checkpoint.json"
CHECKPOINTS = "checkpoints"
"""The folder of all checkpoints, in the run folder."""
FORMAT = 1
READERS = 4
"""Files that are checksummed at one time; one reader does not fill a parallel file system's bandwidth."""
CHUNK = 2**24
_COMMITTED = re.compile(r"v(\d{8,})")
_PARTIAL, _REMOVING = ".partial", ".removing"
_ADVICE = {
    errno.ENOSPC: "free space on this file system, or lower checkpoint.keep_last",
    errno.EDQUOT: "your quota is used up: free space, or lower checkpoint.keep_last",
    errno.EFBIG: "the limit on file sizes (ulimit -f) is too low for this checkpoint",
    errno.EROFS: "the file system is read-only: remount it, or put run.root elsewhere",
    errno.EACCES: "give the user of this run write access, or put run.root elsewhere",
    errno.EPERM: "give the user of this run write access, or put run.root elsewhere",
    errno.ENOTEMPTY: "a checkpoint of this name is there already: move it away",
    errno.EEXIST: "a checkpoint of this name is there already: move it away",
}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Earlier checkpoints and the trainer are as they were."""


def describe(error: OSError) -> str:
    """What went wrong with which file, and what to do about it."""
    where = f" ({error.filename})" if error.filename else ""
    advice = _ADVICE.get(error.errno or 0)
    return f"{error.strerror or error}{where}" + (f"; {advice}" if advice else "")


@dataclass(frozen=True)
class CheckpointRecord:
    """Where the run was when the weights of a checkpoint were taken."""

    version: int
    step: int
    epoch: int
    """How often the run had been started."""
    data_position: int
    """Prompts that had been taken from the prompt set."""
    counts: dict[str, int]
    """The ledger's watermark and counts."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A sound checkpoint, and a sentence for each newer one that was passed over."""

    path: Path
    record: CheckpointRecord
    warnings: tuple[str, ...]


class CheckpointFolder:
    """The folder ``path`` of one run's checkpoints. One process writes to it, one checkpoint at a time."""

    def __init__(self, path: Path, *, keep_last: int, keep_every: int | None = None) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; at least the newest checkpoint must be kept")
        self._path = path
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._unusable: set[Path] = set()
        """Known to be damaged, or rejected by the caller: not to be counted on."""

    # ---- writing

    def begin(self, version: int) -> Path:
        """An empty folder for the ranks to write into. Deletes what was begun or deleted halfway before."""
        final = self._final(version)
        partial = final.with_name(final.name + _PARTIAL)
        with _explained(f"cannot make {partial}"):
            if final.exists():
                raise CheckpointError(f"{final} exists: a version number must not be used twice")
            self._path.mkdir(parents=True, exist_ok=True)
            for leftover in self._leftovers():
                shutil.rmtree(leftover, ignore_errors=True)
            partial.mkdir()
            _sync_folder(self._path)
        return partial

    def commit(self, record: CheckpointRecord) -> Path:
        """Turn the partial checkpoint of ``record.version`` into a whole one."""
        final = self._final(record.version)
        partial = final.with_name(final.name + _PARTIAL)
        with _explained(f"cannot finish {final}"):
            files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
            if not files:
                raise CheckpointError(f"{partial} holds no file: nothing was written into it")
            with ThreadPoolExecutor(READERS) as pool:
                checksums = list(pool.map(_synced_checksum, files))
            listed = [
                {"name": path.relative_to(partial).as_posix(), "size": path.stat().st_size, "crc32": checksum}
                for path, checksum in zip(files, checksums, strict=True)
            ]
            _write_manifest(partial, {"format": FORMAT, **asdict(record), "files": listed})
            for folder in [path for path in partial.rglob("*") if path.is_dir()] + [partial]:
                _sync_folder(folder)
            partial.rename(final)
            _sync_folder(self._path)
        return final

    def discard(self, version: int) -> None:
        """Delete a checkpoint that was begun and failed, as far as that is possible."""
        final = self._final(version)
        shutil.rmtree(final.with_name(final.name + _PARTIAL), ignore_errors=True)

    # ---- reading

    def all(self) -> list[Path]:
        """The committed checkpoints, oldest first, without a look at what is in them."""
        if not self._path.is_dir():
            return []
        return sorted(
            (path for path in self._path.iterdir() if path.is_dir() and _COMMITTED.fullmatch(path.name)),
            key=_version_of,
        )

    def versions(self) -> list[int]:
        """The versions of the committed checkpoints that are not known to be unusable, oldest first."""
        return [_version_of(path) for path in self.all() if path not in self._unusable]

    def latest(
        self, reject: Callable[[CheckpointRecord], str | None] | None = None
    ) -> FoundCheckpoint | None:
        """The newest sound checkpoint, every byte of it checked; None when there is none at all.

        ``reject`` gives a reason to pass a checkpoint over that is sound, or None. Raises CheckpointError
        when none is left because of damage: to start over must be the user's decision.
        """
        warnings: list[str] = []
        damaged = False
        for path in reversed(self.all()):
            record, problems = _record(path)
            reason = reject(record) if reject and record else None
            if reason:
                self._unusable.add(path)
                warnings.append(f"checkpoint {path.name} is passed over: {reason}")
            elif problems := problems or self.verify(path):
                self._unusable.add(path)
                damaged = True
                warnings.append(f"checkpoint {path.name} is damaged: {'; '.join(problems)}")
            else:
                assert record is not None
                return FoundCheckpoint(path, record, tuple(warnings))
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self._path} can be used. {'. '.join(warnings)}. "
                "Restore one from a copy, or move the folder away to start over"
            )
        return None

    def record(self, path: Path) -> CheckpointRecord:
        """Of a sound checkpoint. Raises CheckpointError."""
        record, problems = _record(path)
        if record is None:
            raise CheckpointError(f"{path}: {'; '.join(problems)}")
        return record

    def verify(self, path: Path) -> list[str]:
        """What is wrong with a committed checkpoint; empty when every file is as it was written."""
        problems = _problems(path, checksums=True)
        if problems:
            self._unusable.add(path)
        return problems

    # ---- retention

    def prune(self) -> list[Path]:
        """Delete the checkpoints that need not be kept; those deleted.

        Kept are the newest ``keep_last`` that are not known to be unusable, those at every ``keep_every``-th
        step, and unusable ones that are newer than all of these: they tell of a trouble that may still be
        there. Looks at manifests and sizes; what ``latest`` and ``verify`` found before is remembered.
        """
        committed = self.all()
        sound = [path for path in committed if path not in self._unusable and not _problems(path)]
        if not sound:
            return []
        kept = set(sound[-self._keep_last :]) | {path for path in sound if self._is_milestone(path)}
        newest = _version_of(sound[-1])
        doomed = [path for path in committed if path not in kept and _version_of(path) < newest]
        for path in doomed:
            with _explained(f"cannot delete {path}"):
                removing = path.with_name(path.name + _REMOVING)
                path.rename(removing)
                _sync_folder(self._path)  # renamed on disk before a file is gone
                shutil.rmtree(removing)
            self._unusable.discard(path)
        return doomed

    def _is_milestone(self, path: Path) -> bool:
        return self._keep_every is not None and _read_manifest(path)["step"] % self._keep_every == 0

    def _final(self, version: int) -> Path:
        return self._path / f"v{version:08d}"

    def _leftovers(self) -> list[Path]:
        return [
            path
            for path in self._path.iterdir()
            if path.suffix in (_PARTIAL, _REMOVING) and _COMMITTED.fullmatch(path.stem)
        ]


def _version_of(path: Path) -> int:
    return int(path.name[1:])


def _problems(path: Path, *, checksums: bool = False) -> list[str]:
    try:
        manifest = _read_manifest(path)
    except _BadManifest as error:
        return [str(error)]
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda listed: _problem(path / listed["name"], listed, checksums), manifest["files"])
        return [problem for problem in found if problem]


def _problem(path: Path, listed: dict[str, Any], checksums: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != listed["size"]:
            return f"{listed['name']} has {size} bytes instead of {listed['size']}"
        if checksums and _checksum(path) != listed["crc32"]:
            return f"{listed['name']} has a wrong checksum"
    except FileNotFoundError:
        return f"{listed['name']} is missing"
    except OSError as error:
        return f"{listed['name']} cannot be read: {describe(error)}"
    return None


# ---- the manifest


class _BadManifest(Exception):
    pass


def _own_checksum(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    temporary = folder / f"{MANIFEST}.tmp"
    with temporary.open("w") as file:
        json.dump(manifest | {"crc32": _own_checksum(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / MANIFEST)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest without its own checksum, which is right. Raises _BadManifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        checksum = manifest.pop("crc32")
    except FileNotFoundError:
        raise _BadManifest(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise _BadManifest(f"{MANIFEST} cannot be read: {describe(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _BadManifest(f"{MANIFEST} cannot be understood") from None
    if checksum != _own_checksum(manifest):
        raise _BadManifest(f"{MANIFEST} has a wrong checksum")
    if manifest["format"] != FORMAT:
        raise _BadManifest(f"{MANIFEST} has format {manifest['format']}; this program reads {FORMAT}")
    return manifest


def _record(folder: Path) -> tuple[CheckpointRecord | None, list[str]]:
    """The record, or what is wrong with the manifest."""
    try:
        manifest = _read_manifest(folder)
    except _BadManifest as error:
        return None, [str(error)]
    return CheckpointRecord(**{name: manifest[name] for name in CheckpointRecord.__dataclass_fields__}), []


# ---- the disk


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _synced_checksum(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return _checksum(path)


def _sync_folder(path: Path) -> None:
    """Names are data of the folder: without this a rename may be forgotten by a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {describe(error)}") from error
