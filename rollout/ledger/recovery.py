"""Opens the ledger of a run: a new one, or the ledger of a run that goes on after its process has ended.

A group is trained if its row says so, with a step on the line of versions that leads to the restored one: to
that of the checkpoint. ``Restart.undo_trainings`` makes groups of any other step ready again.
"""

import sqlite3
import uuid
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

from slipstream.rollout.ledger.lineage import INITIAL
from slipstream.rollout.ledger.reading.contents import Contents, OpenGroup, RequeuedGroup
from slipstream.rollout.ledger.reading.history import FailedStep, History, read_history
from slipstream.rollout.ledger.reading.restart import Recovered, Restart
from slipstream.rollout.ledger.rows.samples import OpenSample
from slipstream.rollout.ledger.rows.watermark import Watermark
from slipstream.rollout.ledger.storage.database import (
    FAILURES,
    LEDGER,
    RESTORE,
    LedgerError,
    check_undamaged,
    create_database,
    exists,
    explained,
    log_of,
    open_for_reading,
    open_for_writing,
)
from slipstream.rollout.ledger.storage.segments import FOLDER, SEGMENT_BYTES, Segments
from slipstream.rollout.ledger.storage.stamp import Stamp
from slipstream.rollout.ledger.storage.write_ahead_log import Log, checked_log
from slipstream.rollout.ledger.writing.store import Store
from slipstream.rollout.ledger.writing.writer import Ledger

__all__ = ["LEDGER", "FailedStep", "OpenGroup", "OpenSample", "Recovered", "RequeuedGroup", "open_ledger"]


def open_ledger(
    folder: Path,
    *,
    batch_size: int,
    n_samples: int,
    bound: int,
    restored: int = INITIAL,
    guard: Callable[[], None] = lambda: None,
    segment_bytes: int = SEGMENT_BYTES,
) -> tuple[Ledger, Recovered]:
    """Open the ledger in a run folder for a run that starts from version ``restored``; create it if
    necessary.

    Trainings of versions that are not on the line of ``restored`` are undone: their groups are ready again.
    What is damaged of a group is generated again, and noted. ``guard`` is called by the writer thread before
    each commit, so that it must be cheap; whatever it raises stops the ledger (``FolderLease.check``). Raises
    LedgerError.
    """
    path = folder / LEDGER
    guard()
    if not exists(path):
        _create(path)
    log = checked_log(path)
    _check(path, restored)
    connection = open_for_writing(path)
    try:
        applied: int = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        opening = _Opening(connection, path, n_samples)
        connection.execute("BEGIN IMMEDIATE")
        opening.begin_epoch(restored, bound)
        opening.note_lost_transactions(log, applied)
        settings = {"batch_size": batch_size, "n_samples_per_prompt": n_samples}
        connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", settings.items())
        opening.undo_trainings()
        contents = opening.read()
        recovered = opening.recovered(contents, opening.read_turns(contents))
        connection.execute("UPDATE stamp SET data = ?", (opening.stamp.encode(),))
        connection.execute("COMMIT")
        opening.delete_unknown_segments()
        return opening.ledger(contents, recovered, guard, segment_bytes), recovered
    except (*FAILURES, LedgerError) as error:
        connection.close()
        raise error if isinstance(error, LedgerError) else explained(path, error) from error


def _create(path: Path) -> None:
    segments = Segments(path.parent / FOLDER, b"")
    try:
        has_payload = bool(segments.on_disk())
    except OSError as error:
        raise explained(segments.folder, error) from error
    if has_payload:
        raise LedgerError(
            f"{path} is missing, but there is {segments.folder} with what the run has generated: restore "
            "the file from a copy, or start the run anew under another name"
        )
    run = uuid.uuid4()
    create_database(path, run.hex, Stamp(run.bytes).encode())


class _Opening(Restart):
    """One start of the run. The methods are called in their order, within one transaction."""

    def __init__(self, connection: sqlite3.Connection, path: Path, n_samples: int) -> None:
        history = read_history(connection, path)
        segments = Segments(path.parent / FOLDER, history.stamp.run)
        stamp = history.stamp
        super().__init__(
            connection,
            path,
            segments,
            history,
            replace(stamp, sequence=stamp.sequence + 1, base=stamp.sequence),
            n_samples,
        )

    def note_lost_transactions(self, log: Log, applied: int) -> None:
        """Find out if the database has lost transactions, and take the numbers of their versions.

        ``applied``: number of frames of the log that SQLite has used.
        """
        known = self.known_segments()
        newest = max(known, default=0)
        markers = [
            marker
            for segment in self.segments.on_disk()
            if segment >= newest or segment not in known
            for marker in self.segments.markers(segment)
        ]
        first = self.stamp.sequence  # that of this one; the first one that may be lost
        last = max([log.last, *(sequence for sequence, _ in markers)])
        if last <= first:  # a transaction may have been cut off between its payload and its rows
            if applied < log.frames:
                self.notes.append(
                    f"{log_of(self.path)} ends within transaction {first}: either the process was killed "
                    "or the disk was full while it was written, or the file is damaged; what it recorded is "
                    "generated again"
                )
            return
        self.notes.append(
            f"{self.path} has lost its transactions {first} to {last}, of which {self.segments.folder} "
            "tells: the file or its log was damaged or restored from a copy; what they recorded is generated "
            "again"
        )
        begun = max((begun for _, begun in markers), default=0)
        for version in range(self.stamp.begun + 1, begun + 1):
            self.connection.execute(
                "INSERT INTO versions VALUES (?, ?, ?, 0, 0)", (version, self.restored, self.epoch)
            )
            self.history.parents[version] = self.restored
        self.stamp = replace(self.stamp, sequence=last + 1, begun=max(begun, self.stamp.begun))

    def delete_unknown_segments(self) -> None:
        """Delete segments that no row knows: of transactions that were cut off or lost."""
        known = self.known_segments()
        for segment in self.segments.on_disk():
            if segment not in known:
                self.segments.delete(segment)

    def ledger(
        self, contents: Contents, recovered: Recovered, guard: Callable[[], None], segment_bytes: int
    ) -> Ledger:
        """Return the open ledger."""
        newest = max([0, *self.known_segments(), *self.segments.on_disk()])
        new_segment = count(newest + 1).__next__
        store = Store(
            self.connection,
            self.path,
            self.epoch,
            self.stamp,
            self.segments,
            contents.holds,
            contents.eras,
            contents.trained,
            new_segment,
            segment_bytes,
            guard,
        )
        trained = recovered.counts.trained + recovered.live.counts.get("trained", 0)
        watermark = Watermark(self.stamp.run.hex(), self.stamp.sequence, self.stamp.begun, trained)
        return Ledger(
            self.path,
            self.epoch,
            store,
            self.segments,
            new_segment,
            watermark,
            segment_bytes,
            recovered.live.gateways,
        )


def _check(path: Path, restored: int) -> None:
    """Raise LedgerError unless a run can go on from ``restored``. Changes nothing, not even the log."""
    connection = open_for_reading(path)
    try:
        check_undamaged(connection, path)
        history = read_history(connection, path)
        _check_account(connection, path, history)
        if not history.knows(restored):
            raise LedgerError(
                f"{path} knows no published version {restored}, from which the run is to go on: it is older "
                f"than the checkpoint: {RESTORE}"
            )
        if not history.is_on_line(restored):
            raise LedgerError(
                f"{path}: the run has gone on from an older version since version {restored}, whose groups "
                f"were given back: go on from version {history.newest} or one of its ancestors, or start the "
                "run anew under another name"
            )
    except FAILURES as error:
        raise explained(path, error) from error
    finally:
        connection.close()


def _check_account(connection: sqlite3.Connection, path: Path, history: History) -> None:
    """Raise LedgerError unless groups, trainings and versions were recorded up to the same time."""
    trained: int
    with_training: int
    trained, with_training = connection.execute(
        "SELECT count(*), count(t.version) FROM groups g LEFT JOIN trainings t "
        "ON t.version = g.step AND t.group_id = g.id WHERE g.state = 'trained'"
    ).fetchone()
    turns: int
    turns_with_training: int
    turns, turns_with_training = connection.execute(
        "SELECT count(*), count(t.version) FROM turns u LEFT JOIN trainings t "
        "ON t.version = u.step AND t.group_id = u.id WHERE u.state = 'trained'"
    ).fetchone()
    trained, with_training = trained + turns, with_training + turns_with_training
    behind = sum(history.trained.get(version, 0) for version in history.line)
    if not trained == with_training == behind:
        raise LedgerError(
            f"{path} is damaged: {trained} groups and turns count as trained, {with_training} of them with a "
            f"training, and the steps that led to the weights trained {behind}: {RESTORE}"
        )
