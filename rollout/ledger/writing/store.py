"""The work of the writer thread: one transaction after the other, segments first.

frames ──► segment, on disk ──► rows, stamp ──► COMMIT ──► tidy: drop segments, copy what is left of others,
                                                           write SQLite's log back
"""

import ctypes
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from struct import pack

from slipstream.rollout.ledger.reading.history import read_history
from slipstream.rollout.ledger.reading.restart import Restart
from slipstream.rollout.ledger.rows.holds import Eras, Holds
from slipstream.rollout.ledger.rows.samples import SAMPLES, SampleRow, StoredRow, stored
from slipstream.rollout.ledger.storage.database import LedgerError, crc_of, log_of, sealed
from slipstream.rollout.ledger.storage.segments import Part, Segments
from slipstream.rollout.ledger.storage.stamp import Stamp
from slipstream.rollout.ledger.writing.moves import Moved, gather
from slipstream.rollout.ledger.writing.transaction import RestartRequest, Training, Transaction
from slipstream.rollout.ledger.writing.turn_rows import TurnRows
from slipstream.rollout.tokens.record import REF

LOG_BYTES = 16 << 20
"""Size of SQLite's log from which it is written back into the file."""

SPARSE = 8
"""A segment is sparse when at most one in so many of its groups needs it, or when it is so much smaller than
others."""

SPARSE_SEGMENTS = 4
"""Number of sparse segments from which what is needed of them is copied into one new segment."""

RECENT = 2
"""Newest segments that stay even if no group needs them: rows that point into them may be on their way."""

Row = tuple[int | float | str | bytes | None, ...]
"""Values of one row of any table."""

CHUNKS = (128, 16, 1)
"""Rows per statement. SQLite releases the interpreter lock once per statement, and gets it back only when the
event loop gives it up: with one row per statement it would wait as often as there are rows."""


class Store:
    """The files of an open ledger. Used by the writer thread only, but ``moved`` by any."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        epoch: int,
        stamp: Stamp,
        segments: Segments,
        holds: Holds,
        eras: Eras,
        trained: Iterable[tuple[int, list[int]]],
        new_segment: Callable[[], int],
        segment_bytes: int,
        guard: Callable[[], None],
    ) -> None:
        """``trained``: versions on the present line that are not released, with the groups trained on each,
        in ascending order. ``new_segment``: gives the number of a new segment.
        """
        self._connection = connection
        self._path = path
        self._log = log_of(path)
        self._epoch = epoch
        self._stamp: Stamp = stamp
        self._segments = segments
        self._holds: Holds = holds
        self._eras: Eras = eras
        self._trained: deque[tuple[int, list[int]]] = deque(trained)
        self._new_segment = new_segment
        self._segment_bytes = segment_bytes
        self._tidied: int | None = None
        """Newest segment when sparse ones were last looked for."""
        self._guard = guard
        self.moved = Moved()
        self._turns = TurnRows(connection, segments, holds, self.moved, stamp.released)

    def commit(self, events: Transaction) -> None:
        """Write a transaction. When this returns, it survives a power cut."""
        self._guard()
        begun = max([self._stamp.begun, *(version for version, _, _ in events.begun)])
        for part in events.parts:
            self._segments.write(part, events.sequence, begun)
        with self._transaction(events.sequence):
            self._write_groups(events)
            self._write_samples(events)
            self._write_states(events)
            new = self._turns.write(events.turns)
            self._stamp = replace(self._stamp, turns=self._stamp.turns + new)
            self._write_steps(events)
            self._turns.close_over(events.turns)
        if events.restart is not None:
            self._restart(events.restart)

    def _restart(self, request: RestartRequest) -> None:
        """Go on from an older version, as a process does that resumes the run. Raises LedgerError."""
        history = read_history(self._connection, self._path)
        if not (history.knows(request.restored) and history.is_on_line(request.restored)):
            raise LedgerError(
                f"{self._path}: the trainer cannot go on from version {request.restored}, from which the "
                "present weights do not descend"
            )
        restart = Restart(
            self._connection, self._path, self._segments, history, self._stamp, request.n_samples
        )
        with self._transaction():
            restart.begin_epoch(request.restored, request.bound)
            restart.undo_trainings()
            contents = restart.read()
            recovered = restart.recovered(contents, restart.read_turns(contents))
            self._stamp = restart.stamp
        self._epoch = restart.epoch
        self._holds, self._eras, self._trained = contents.holds, contents.eras, deque(contents.trained)
        self._turns = TurnRows(
            self._connection, self._segments, self._holds, self.moved, self._stamp.released
        )
        request.recovered = recovered

    def tidy(self) -> None:
        """Delete segments that no group needs, and write SQLite's log back when it is long."""
        self._guard()
        if not self._turns.is_tidy:
            with self._transaction():
                self._turns.tidy()
        recent = self._eras.recent(RECENT)
        old = [segment for segment in self._holds.ever if segment not in recent]
        if unneeded := [segment for segment in old if not self._holds.groups[segment]]:
            with self._transaction():
                self._forget(unneeded)
            self._delete(unneeded)
        if self._eras.newest != self._tidied:
            self._tidied = self._eras.newest
            sparse = [s for s in old if self._holds.groups[s] and self._is_sparse(s)]
            if len(sparse) >= SPARSE_SEGMENTS:
                self._move(sparse)
        if _size(self._log) >= LOG_BYTES:
            busy, pages, done = self._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
            if not busy and pages == done:
                self._stamp = replace(self._stamp, base=self._stamp.sequence)

    def close(self) -> None:
        """Close the files. Raises what ``guard`` raises."""
        self._segments.close()
        try:
            self._guard()
        except BaseException:
            _leave_open(self._connection)
            raise
        self._connection.close()

    @contextmanager
    def _transaction(self, sequence: int | None = None) -> Generator[None]:
        """Commit what the block writes, together with the stamp."""
        connection = self._connection
        connection.execute("BEGIN")
        try:
            yield
            if sequence is not None:
                self._stamp = replace(self._stamp, sequence=sequence)
            connection.execute("UPDATE stamp SET data = ?", (self._stamp.encode(),))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    # ---- one kind of events each

    def _write_groups(self, events: Transaction) -> None:
        if not events.groups:
            return
        self._write(
            "INSERT INTO groups (id, position, requeued_from, version, epoch, state, since) VALUES {rows} "
            "ON CONFLICT (id) DO UPDATE SET "
            "version = excluded.version, epoch = excluded.epoch, state = 'admitted', tokens = NULL",
            "(?, ?, ?, ?, ?, 'admitted', 0)",
            events.groups,
        )
        new = 0
        for row in events.groups:
            new += row[0] not in self._holds.segments
            self._holds.begin(row[0])
        self._stamp = replace(self._stamp, groups=self._stamp.groups + new)

    def _write_samples(self, events: Transaction) -> None:
        first = self._stamp.rows
        for part in events.parts:
            self._begin_era(part, first)
        if not events.samples:
            return
        rows = list(self._rows(events.samples, first))
        self._write("INSERT INTO samples VALUES {rows}", "(?, ?, ?, ?, ?, ?)", rows)
        self._stamp = replace(self._stamp, rows=first + len(events.samples))

    def _begin_era(self, part: Part, row: int) -> None:
        if not part.start:
            self._connection.execute("INSERT INTO segments VALUES (?, ?)", (part.segment, row))
            self._eras.begin(part.segment, row)
            self._holds.know(part.segment)

    def _rows(self, samples: Iterable[SampleRow], first: int) -> Iterator[StoredRow]:
        """Yield the rows of groups that have not ended, and note which segments the groups need."""
        era = self._eras.newest
        prefix = b"" if era is None else pack("<I", era)
        segments, need = self._holds.segments, self._holds.need
        for id_, row in enumerate(samples, first):
            group, refs = row[0] // SAMPLES, row[3]
            if group not in segments:
                continue
            if refs and self.moved:
                refs = self.moved.present(refs)
                row = (row[0], row[1], row[2], refs, row[4])
            if era is not None:
                need(group, era)
            if refs and not (len(refs) == REF.size and refs.startswith(prefix)):
                self._holds.need_all(group, refs)
            yield stored(id_, row)

    def _write_states(self, events: Transaction) -> None:
        states = events.states
        for version, trainings in events.published:
            for training in trainings:
                id_ = training.group_id
                if id_ < 0:
                    continue
                states[id_] = (id_, "trained", None, version, training.sampled, None)
        self._write(
            "UPDATE groups SET state = v.column2, loss = v.column3, step = v.column4, tokens = v.column5, "
            "note = v.column6 FROM (VALUES {rows}) AS v WHERE groups.id = v.column1",
            "(?, ?, ?, ?, ?, ?)",
            states.values(),
        )
        if events.discards:
            first = self._stamp.rows - len(events.samples)
            since = [(first + number, id_) for id_, _, number in events.discards]
            self._connection.executemany("UPDATE groups SET since = ? WHERE id = ?", since)
            discards = [(id_, self._epoch, tokens) for id_, tokens, _ in events.discards]
            self._write("INSERT INTO discards VALUES {rows}", "(?, ?, ?)", discards)
        for id_ in events.ended:
            self._end(id_)

    def _write_steps(self, events: Transaction) -> None:
        execute = self._connection.execute
        stamp = self._stamp
        for version, parent, groups in events.begun:
            is_copy = groups is None
            execute("INSERT INTO versions VALUES (?, ?, ?, ?, 0)", (version, parent, self._epoch, is_copy))
            stamp = replace(stamp, begun=max(stamp.begun, version))
            if groups is None:
                continue
            ids = pack(f"<{len(groups)}q", *groups)
            execute("INSERT INTO batches VALUES (?, ?)", (version, sealed(ids, crc_of(version))))
            stamp = replace(stamp, batches=stamp.batches + 1)
        for version, reason in events.failures:
            execute("INSERT INTO failures VALUES (?, ?, ?)", (version, self._epoch, reason))
        for version, trainings in events.published:
            execute("UPDATE versions SET published = 1 WHERE version = ?", (version,))
            rows = [training_row(version, training) for training in trainings]
            self._write("INSERT INTO trainings VALUES {rows}", "(?, ?, ?, ?, ?, ?)", rows)
            self._turns.trained(version, trainings)
            self._trained.append((version, [training.group_id for training in trainings]))
            stamp = replace(stamp, trainings=stamp.trainings + len(trainings))
        for version, digest in events.checkpoints:
            execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", (version, self._epoch, digest))
        self._stamp = stamp
        if events.released is not None:
            self._release(events.released)

    def _release(self, version: int) -> None:
        self._stamp = replace(self._stamp, released=max(self._stamp.released, version))
        turns: list[int] = []
        while self._trained and self._trained[0][0] <= version:
            for id_ in self._trained.popleft()[1]:
                if id_ < 0:
                    turns.append(id_)
                else:
                    self._end(id_)
        self._turns.released(version, turns)

    def _end(self, id_: int) -> None:
        """Note that nothing of a group is needed any more."""
        self._holds.end(id_)
        self.moved.forget(id_)

    def _write(self, statement: str, row: str, rows: Iterable[Row]) -> None:
        """Execute ``statement`` for all rows, with its ``{rows}`` replaced by one ``row`` for each."""
        left = list(rows)
        done = 0
        for size in CHUNKS:
            while len(left) - done >= size:
                sql = statement.format(rows=", ".join([row] * size))
                self._connection.execute(sql, list(chain.from_iterable(left[done : done + size])))
                done += size

    # ---- tidying

    def _is_sparse(self, segment: int) -> bool:
        few_groups = self._holds.groups[segment] * SPARSE <= self._holds.ever[segment]
        return few_groups or _size(self._segments.path(segment)) * SPARSE <= self._segment_bytes

    def _move(self, sparse: list[int]) -> None:
        """Copy what is left in sparse segments into a new one, and delete them.

        Holders of references to the chunks go on using them: ``moved`` says where the chunks are now.
        """
        leaving = set(sparse)
        groups = [id_ for id_, needed in self._holds.segments.items() if leaving.intersection(needed)]
        sessions = [id_ for id_ in groups if id_ < 0]
        part = Part(self._new_segment(), 0)
        first = self._stamp.rows
        with self._transaction():
            gathered = gather(
                self._connection, [id_ for id_ in groups if id_ >= 0], self._segments, leaving, part
            )
            gathered.places |= self._turns.move(sessions, leaving, part)
            self._segments.write(part, self._stamp.sequence, self._stamp.begun)
            self._connection.execute("INSERT INTO segments VALUES (?, NULL)", (part.segment,))
            rows = [stored(id_, row) for id_, row in enumerate(gathered.rows, first)]
            self._write("INSERT INTO samples VALUES {rows}", "(?, ?, ?, ?, ?, ?)", rows)
            self._stamp = replace(self._stamp, rows=first + len(rows))
            self._forget(sparse)
        self.moved.add(gathered.places)
        self._holds.know(part.segment)
        era = self._eras.newest
        for id_ in groups:
            self._holds.let_go(id_, leaving)
            self._holds.need(id_, part.segment)
            if era is not None and id_ >= 0:
                self._holds.need(id_, era)
        self._delete(sparse)

    def _forget(self, segments: Iterable[int]) -> None:
        """Delete the rows of segments and those of their eras."""
        for segment in segments:
            if rows := self._eras.rows(segment):
                self._connection.execute("DELETE FROM samples WHERE id >= ? AND id < ?", rows)
            self._connection.execute("DELETE FROM segments WHERE segment = ?", (segment,))

    def _delete(self, segments: Iterable[int]) -> None:
        for segment in segments:
            self._eras.forget(segment)
            self._holds.forget(segment)
            self._segments.delete(segment)


def training_row(version: int, training: Training) -> Row:
    """Return the row of a training."""
    id_, head_lag, tokens, masked, _, versions = training
    numbers = pack(f"<{2 * len(versions)}q", *chain.from_iterable(versions))
    seal = sealed(numbers, crc_of(version, id_, head_lag, tokens, masked))
    return version, id_, head_lag, tokens, masked, seal


def _leave_open(connection: sqlite3.Connection) -> None:
    """Keep the connection open until the process ends.

    SQLite writes when it closes a file: it would copy an outdated log over the pages of the process that has
    the ledger now. The reference that is added here is never given back.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
