"""Opens the ledger of a run: a new one, or the ledger of a run that goes on after its process has ended."""

import json
import os
import socket
import sqlite3
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from slipstream.rollout.control.core import GroupCounts, Loss
from slipstream.rollout.ledger.contents import Contents, OpenGroup, RequeuedGroup, read_contents
from slipstream.rollout.ledger.database import (
    FAILURES,
    LEDGER,
    RESTORE,
    LedgerError,
    check_undamaged,
    create_database,
    exists,
    explained,
    few,
    log_of,
    open_for_reading,
    open_for_writing,
)
from slipstream.rollout.ledger.history import FailedStep, History, read_history
from slipstream.rollout.ledger.lineage import INITIAL
from slipstream.rollout.ledger.log import Log, checked_log
from slipstream.rollout.ledger.samples import SAMPLES, OpenSample, stored
from slipstream.rollout.ledger.segments import FOLDER, SEGMENT_BYTES, Segments
from slipstream.rollout.ledger.stamp import Stamp
from slipstream.rollout.ledger.store import Store
from slipstream.rollout.ledger.watermark import Watermark
from slipstream.rollout.ledger.writer import Ledger

__all__ = ["LEDGER", "FailedStep", "OpenGroup", "OpenSample", "Recovered", "RequeuedGroup", "open_ledger"]


@dataclass
class Recovered:
    """The state from which a run goes on."""

    epoch: int
    restored: int
    """Version that the run goes on from."""
    step: int
    """Training steps behind the restored version."""
    versions: list[tuple[int, int]]
    """(version, parent) of every version that was ever begun, in ascending order."""
    position: int
    """Number of prompts drawn from the prompt set."""
    counts: GroupCounts
    losses: Counter[Loss]
    open: list[OpenGroup]
    """All groups that have not ended, by id."""
    requeued: list[RequeuedGroup]
    """All expired groups whose prompts are to be admitted again, by id."""
    failures: list[tuple[int, ...]]
    """Each training step in which the trainer died or raised, unless a quarantined group was in it: its
    groups without those that were trained since. In order."""
    notes: list[str]
    """Messages about damage, for the user."""


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
        recovered = opening.recovered(contents)
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


class _Opening:
    """One start of the run. The methods are called in their order, within one transaction."""

    def __init__(self, connection: sqlite3.Connection, path: Path, n_samples: int) -> None:
        self._connection = connection
        self._path = path
        self._n_samples = n_samples
        self._history = read_history(connection, path)
        stamp = self._history.stamp
        self._segments = Segments(path.parent / FOLDER, stamp.run)
        self._notes: list[str] = []
        self._line: list[int] = []
        self._epoch = self._history.epochs
        self.stamp = replace(stamp, sequence=stamp.sequence + 1, base=stamp.sequence)

    def begin_epoch(self, restored: int, bound: int) -> None:
        """Begin an epoch that goes on from ``restored``."""
        self._line = self._history.line_of(restored)
        self._restored = restored
        self._connection.execute(
            "INSERT INTO epochs VALUES (?, ?, ?, ?, ?, ?)",
            (
                self._epoch,
                restored,
                len(self._line),
                bound,
                datetime.now(UTC).isoformat(timespec="seconds"),
                f"{socket.gethostname()}:{os.getpid()}",
            ),
        )

    def note_lost_transactions(self, log: Log, applied: int) -> None:
        """Find out if the database has lost transactions, and take the numbers of their versions.

        ``applied``: number of frames of the log that SQLite has used.
        """
        known = self._known_segments()
        newest = max(known, default=0)
        markers = [
            marker
            for segment in self._segments.on_disk()
            if segment >= newest or segment not in known
            for marker in self._segments.markers(segment)
        ]
        first = self.stamp.sequence  # that of this one; the first one that may be lost
        last = max([log.last, *(sequence for sequence, _ in markers)])
        if last <= first:  # a transaction may have been cut off between its payload and its rows
            if applied < log.frames:
                self._notes.append(
                    f"{log_of(self._path)} ends within transaction {first}: either the process was killed "
                    "or the disk was full while it was written, or the file is damaged; what it recorded is "
                    "generated again"
                )
            return
        self._notes.append(
            f"{self._path} has lost its transactions {first} to {last}, of which {self._segments.folder} "
            "tells: the file or its log was damaged or restored from a copy; what they recorded is generated "
            "again"
        )
        begun = max((begun for _, begun in markers), default=0)
        for version in range(self.stamp.begun + 1, begun + 1):
            self._connection.execute(
                "INSERT INTO versions VALUES (?, ?, ?, 0)", (version, self._restored, self._epoch)
            )
            self._history.parents[version] = self._restored
        self.stamp = replace(self.stamp, sequence=last + 1, begun=max(begun, self.stamp.begun))

    def undo_trainings(self) -> None:
        """Make groups ready again that were trained off the line. Those that were released start again."""
        line = json.dumps(self._line)
        undone = "state = 'trained' AND step NOT IN (SELECT value FROM json_each(:line))"
        released = f"{undone} AND step <= :released"
        values = {
            "line": line,
            "epoch": self._epoch,
            "rows": self.stamp.rows,
            "released": self.stamp.released,
        }
        self._connection.execute(
            f"INSERT INTO discards SELECT id, :epoch, tokens FROM groups WHERE {released}", values
        )
        self._connection.execute(
            "UPDATE groups SET state = 'admitted', step = NULL, tokens = NULL, since = :rows "
            f"WHERE {released}",
            values,
        )
        self._connection.execute(f"UPDATE groups SET state = 'ready', step = NULL WHERE {undone}", values)

    def read(self) -> Contents:
        """Read what exists of the groups that go on. Give up what is damaged."""
        contents = read_contents(
            self._connection, self._path, self._segments, self._n_samples, self.stamp.released
        )
        self._notes += contents.notes
        for problem, ids in contents.damage.items():
            self._notes.append(
                f"{problem}: what is lost of {len(ids)} groups is generated again: {few(sorted(ids))}"
            )
        first = self.stamp.rows
        rows = [stored(id_, row) for id_, row in enumerate(contents.voids, first)]
        self._connection.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?)", rows)
        self.stamp = replace(self.stamp, rows=first + len(rows))
        newest = contents.eras.newest
        for key, *_ in contents.voids:
            if newest is not None:
                contents.holds.need(key // SAMPLES, newest)
        self._connection.executemany(
            "INSERT INTO discards VALUES (?, ?, ?)",
            [(id_, self._epoch, tokens) for id_, tokens in contents.given_up.items()],
        )
        incomplete = [(group.id,) for group in contents.incomplete]
        self._connection.executemany(
            "UPDATE groups SET state = 'admitted', tokens = NULL WHERE id = ?", incomplete
        )
        return contents

    def recovered(self, contents: Contents) -> Recovered:
        """Return the state from which the run goes on."""
        states = dict(self._counts("SELECT state, count(*) FROM groups GROUP BY state"))
        losses = self._counts("SELECT loss, count(*) FROM groups WHERE loss IS NOT NULL GROUP BY loss")
        position: int
        (position,) = self._connection.execute("SELECT coalesce(max(position) + 1, 0) FROM groups").fetchone()
        ends = (states.get(end, 0) for end in ("trained", "filtered", "expired", "failed"))
        try:
            counted = Counter({Loss(loss): number for loss, number in losses})
        except ValueError as error:
            raise LedgerError(f"{self._path}: {error}: the file is damaged: {RESTORE}") from error
        return Recovered(
            epoch=self._epoch,
            restored=self._restored,
            step=len(self._line),
            versions=sorted(self._history.parents.items()),
            position=position,
            counts=GroupCounts(sum(states.values()), *ends),
            losses=counted,
            open=contents.open,
            requeued=contents.requeued,
            failures=self._unexplained_failures(),
            notes=self._notes,
        )

    def _unexplained_failures(self) -> list[tuple[int, ...]]:
        failures: list[tuple[int, ...]] = []
        for step in self._history.failed_steps:
            rows: list[tuple[int, str, str | None]] = self._connection.execute(
                "SELECT id, state, loss FROM groups WHERE id IN (SELECT value FROM json_each(?))",
                (json.dumps(step.groups),),
            ).fetchall()
            left = tuple(id_ for id_, state, _ in rows if state != "trained")
            if left and not any(loss == Loss.QUARANTINED for _, _, loss in rows):
                failures.append(left)
        return failures

    def delete_unknown_segments(self) -> None:
        """Delete segments that no row knows: of transactions that were cut off or lost."""
        known = self._known_segments()
        for segment in self._segments.on_disk():
            if segment not in known:
                self._segments.delete(segment)

    def ledger(
        self, contents: Contents, recovered: Recovered, guard: Callable[[], None], segment_bytes: int
    ) -> Ledger:
        """Return the open ledger."""
        newest = max([0, *self._known_segments(), *self._segments.on_disk()])
        new_segment = count(newest + 1).__next__
        store = Store(
            self._connection,
            self._path,
            self._epoch,
            self.stamp,
            self._segments,
            contents.holds,
            contents.eras,
            contents.trained,
            new_segment,
            segment_bytes,
            guard,
        )
        trained = recovered.counts.trained
        watermark = Watermark(self.stamp.run.hex(), self.stamp.sequence, self.stamp.begun, trained)
        return Ledger(self._path, self._epoch, store, self._segments, new_segment, watermark, segment_bytes)

    def _known_segments(self) -> set[int]:
        rows: Iterable[tuple[int]] = self._connection.execute("SELECT segment FROM segments")
        return {segment for (segment,) in rows}

    def _counts(self, query: str) -> list[tuple[str, int]]:
        return self._connection.execute(query).fetchall()


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
                f"were given back: go on from a version behind {history.newest}, or start the run anew under "
                "another name"
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
    behind = sum(history.trained.get(version, 0) for version in history.line)
    if not trained == with_training == behind:
        raise LedgerError(
            f"{path} is damaged: {trained} groups count as trained, {with_training} of them with a training, "
            f"and {behind} are behind the weights: {RESTORE}"
        )
