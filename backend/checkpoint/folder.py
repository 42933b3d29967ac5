"""The checkpoints of a run: one folder each, complete or absent.

    v00000008.partial/   begin() made it; the trainer's ranks write into it
    v00000008/           commit(): checksums, checkpoint.json, every file on disk, then one rename
    v00000008.removing/  prune() is deleting it

A kill at any moment leaves one of these names, and only the middle one is ever read. ``checkpoint.json`` is
the last file written. It lists all others with size and checksum, so later damage is found before it is
trained on. The methods block on the disk: call them in a worker thread.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError, explained
from slipstream.backend.checkpoint.manifest import (
    BadManifest,
    CheckpointRecord,
    problems_of,
    read_manifest,
    write_manifest,
)
from slipstream.rollout.system.disk import waits_for_disk
from slipstream.rollout.system.durable import sync_folder

CHECKPOINTS = "checkpoints"
"""Name of the folder of all checkpoints within the run folder."""
_COMMITTED = re.compile(r"v(\d{8,})")
_PARTIAL, _REMOVING = ".partial", ".removing"


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
        self.path = path
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._unusable: set[Path] = set()
        """Checkpoints known to be damaged, or rejected by the caller; they do not count as kept."""

    # ---- writing

    def begin(self, version: int) -> Path:
        """Make an empty folder for the ranks to write into.

        Deletes what an earlier process began to write or to delete and did not finish.
        """
        final, partial = self._final(version), self._partial(version)
        with explained(f"cannot make {partial}"), waits_for_disk(CHECKPOINTS):
            if final.exists():
                raise CheckpointError(f"{final} exists: a version number must not be used twice")
            self.path.mkdir(parents=True, exist_ok=True)
            for leftover in self._leftovers():
                shutil.rmtree(leftover, ignore_errors=True)
            partial.mkdir()
            sync_folder(self.path)
        return partial

    def commit(self, record: CheckpointRecord) -> Path:
        """Turn the partial checkpoint of ``record.version`` into a complete one, and return its path."""
        final, partial = self._final(record.version), self._partial(record.version)
        with explained(f"cannot finish {final}"):
            write_manifest(partial, record)
            for folder in [path for path in partial.rglob("*") if path.is_dir()] + [partial]:
                sync_folder(folder)
            partial.rename(final)
            sync_folder(self.path)
        return final

    def discard(self, version: int) -> None:
        """Delete a checkpoint that was begun and failed, as far as the disk permits."""
        shutil.rmtree(self._partial(version), ignore_errors=True)

    # ---- reading

    def all(self) -> list[Path]:
        """Return the committed checkpoints, oldest first, without reading them. Raises CheckpointError."""
        with explained(f"cannot list {self.path}"):
            if not self.path.is_dir():
                return []
            found = [
                path for path in self.path.iterdir() if path.is_dir() and _COMMITTED.fullmatch(path.name)
            ]
        return sorted(found, key=_version_of)

    def versions(self) -> list[int]:
        """Return the versions of the committed checkpoints not known to be unusable, oldest first."""
        return [_version_of(path) for path in self.all() if path not in self._unusable]

    def latest(
        self, reject: Callable[[CheckpointRecord], str | None] | None = None
    ) -> FoundCheckpoint | None:
        """Return the newest sound checkpoint, every byte of it checked; None if there is none at all.

        reject: returns a reason to pass over a sound checkpoint, or None. Raises CheckpointError if damage
        leaves no checkpoint: to start over must be the user's decision.
        """
        warnings: list[str] = []
        damaged = False
        for path in reversed(self.all()):
            record, problems = _record_or_problems(path)
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
                f"no checkpoint in {self.path} can be used. {'. '.join(warnings)}. "
                "Restore one from a copy, or move the folder away to start over"
            )
        return None

    def record(self, path: Path) -> CheckpointRecord:
        """Return the record of a committed checkpoint. Raises CheckpointError if its manifest is damaged."""
        try:
            return read_manifest(path).record
        except BadManifest as error:
            raise CheckpointError(f"{path}: {error}") from error

    def verify(self, path: Path) -> list[str]:
        """Return what is wrong with a committed checkpoint; empty if every file is as it was written."""
        problems = problems_of(path, checksums=True)
        if problems:
            self._unusable.add(path)
        return problems

    # ---- retention

    def prune(self) -> list[Path]:
        """Delete the checkpoints that need not be kept, and return them.

        Kept are the newest ``keep_last`` checkpoints not known to be unusable, those at every
        ``keep_every``-th step, and unusable ones newer than all of these: their cause may persist. Only
        manifests and sizes are read; earlier results of ``latest`` and ``verify`` are remembered.
        """
        committed = self.all()
        sound = [
            path
            for path in committed
            if path not in self._unusable and not problems_of(path, checksums=False)
        ]
        if not sound:
            return []
        kept = set(sound[-self._keep_last :]) | {path for path in sound if self._is_milestone(path)}
        newest = _version_of(sound[-1])
        doomed = [path for path in committed if path not in kept and _version_of(path) < newest]
        for path in doomed:
            with explained(f"cannot delete {path}"):
                removing = path.with_name(path.name + _REMOVING)
                path.rename(removing)
                sync_folder(self.path)  # the rename must be on disk before the first file is gone
                shutil.rmtree(removing)
            self._unusable.discard(path)
        return doomed

    def _is_milestone(self, path: Path) -> bool:
        return self._keep_every is not None and read_manifest(path).record.step % self._keep_every == 0

    def _final(self, version: int) -> Path:
        return self.path / f"v{version:08d}"

    def _partial(self, version: int) -> Path:
        return self.path / f"v{version:08d}{_PARTIAL}"

    def _leftovers(self) -> list[Path]:
        return [
            path
            for path in self.path.iterdir()
            if path.suffix in (_PARTIAL, _REMOVING) and _COMMITTED.fullmatch(path.stem)
        ]


def _version_of(path: Path) -> int:
    return int(path.name[1:])


def _record_or_problems(path: Path) -> tuple[CheckpointRecord | None, list[str]]:
    try:
        return read_manifest(path).record, []
    except BadManifest as error:
        return None, [str(error)]
