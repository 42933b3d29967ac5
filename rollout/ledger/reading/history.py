"""The course of a run so far, from its ledger: starts, versions, failed steps, checkpoints."""

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from struct import iter_unpack

from slipstream.rollout.ledger.lineage import INITIAL, BrokenTree, line_of
from slipstream.rollout.ledger.storage.database import (
    FAILURES,
    LEDGER,
    RESTORE,
    BrokenSeal,
    LedgerError,
    crc_of,
    explained,
    open_for_reading,
    unsealed,
)
from slipstream.rollout.ledger.storage.stamp import Stamp, read_stamp
from slipstream.rollout.ledger.storage.write_ahead_log import checked_log


@dataclass(frozen=True)
class FailedStep:
    """A training step in which the trainer died or raised."""

    version: int
    """Version that the step was to make."""
    reason: str
    groups: tuple[int, ...]
    """Ids of the groups of its batch, and of its turns (below 0)."""


@dataclass
class History:
    """The course of a run so far."""

    path: Path
    stamp: Stamp
    epochs: int
    """Number of starts."""
    newest: int
    """Version published last, or restored by the last start."""
    parents: dict[int, int]
    """Parent of every version that was ever begun."""
    copies: set[int]
    """Versions whose weights are those of their parents."""
    published: set[int]
    trained: dict[int, int]
    """Number of groups and turns trained, by version."""
    failed_steps: list[FailedStep]
    checkpoints: dict[int, str]
    """Digest of the record of each committed checkpoint, by version."""

    def __post_init__(self) -> None:
        self.line = self.line_of(self.newest)
        """Versions that today's weights descend from, with their own."""
        self._on_line = frozenset(self.line)

    def knows(self, version: int) -> bool:
        """True if a version was published, or is the initial one."""
        return version == INITIAL or version in self.published

    def is_on_line(self, version: int) -> bool:
        """True if today's weights are those of ``version`` or descend from them."""
        return version == INITIAL or version in self._on_line

    def trained_by(self, version: int) -> int:
        """Return the number of groups and turns that the line of a version trained. Raises LedgerError."""
        return sum(self.trained.get(each, 0) for each in self.line_of(version))

    def line_of(self, version: int) -> list[int]:
        """Return the versions that the weights of ``version`` descend from. Raises LedgerError."""
        try:
            return line_of(self.parents, version)
        except BrokenTree as error:
            raise LedgerError(f"{self.path}: {error}: {RESTORE}") from error


def history_of(folder: Path) -> History:
    """Read the history of a run that is not running. Raises LedgerError."""
    path = folder / LEDGER
    checked_log(path)
    connection = open_for_reading(path)
    try:
        return read_history(connection, path)
    except FAILURES as error:
        raise explained(path, error) from error
    finally:
        connection.close()


def read_history(connection: sqlite3.Connection, path: Path) -> History:
    """Read the history of a run from its open ledger. Raises LedgerError."""
    versions: Iterable[tuple[int, int, int, int]] = connection.execute(
        "SELECT version, parent, copy, published FROM versions ORDER BY version"
    )
    parents: dict[int, int] = {}
    copies: set[int] = set()
    published: set[int] = set()
    for version, parent, is_copy, is_published in versions:
        parents[version] = parent
        if is_copy:
            copies.add(version)
        if is_published:
            published.add(version)
    trained: list[tuple[int, int]] = connection.execute(
        "SELECT version, count(*) FROM trainings GROUP BY version"
    ).fetchall()
    checkpoints: list[tuple[int, str]] = connection.execute(
        "SELECT version, digest FROM checkpoints ORDER BY version"
    ).fetchall()
    epochs: int
    (epochs,) = connection.execute("SELECT count(*) FROM epochs").fetchone()
    return History(
        path=path,
        stamp=read_stamp(connection, path),
        epochs=epochs,
        newest=newest_version(connection),
        parents=parents,
        copies=copies,
        published=published,
        trained=dict(trained),
        failed_steps=_failed_steps(connection, path),
        checkpoints=dict(checkpoints),
    )


def newest_version(connection: sqlite3.Connection) -> int:
    """Return the version that the last epoch has published last, or else the one that it restored."""
    row: tuple[int] | None = connection.execute(
        "SELECT max(coalesce(v.version, 0), e.restored) FROM epochs e LEFT JOIN versions v "
        "ON v.epoch = e.epoch AND v.published = 1 ORDER BY e.epoch DESC, v.version DESC LIMIT 1"
    ).fetchone()
    return INITIAL if row is None else row[0]


def _failed_steps(connection: sqlite3.Connection, path: Path) -> list[FailedStep]:
    rows: Iterable[tuple[int, str, bytes | None]] = connection.execute(
        "SELECT f.version, f.reason, b.groups FROM failures f LEFT JOIN batches b ON b.version = f.version "
        "ORDER BY f.rowid"
    )
    steps: list[FailedStep] = []
    for version, reason, blob in rows:
        try:
            steps.append(FailedStep(version, reason, () if blob is None else batch_groups(version, blob)))
        except BrokenSeal as error:
            raise LedgerError(f"{path}: the batch of version {version}: {error}: {RESTORE}") from error
    return steps


def batch_groups(version: int, blob: bytes) -> tuple[int, ...]:
    """Return the ids of the groups of a batch. Raises BrokenSeal."""
    return tuple(id_ for (id_,) in iter_unpack("<q", unsealed(blob, crc_of(version))))
