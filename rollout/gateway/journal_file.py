"""The file of a gateway's journal: its tables, how it is opened, and what is done to it. SQLite in WAL mode.

    entries    number | kind | session | key | data, msgpack | chunk | CRC-32 of all of that
    stamp      who the journal is, its last number, the last acknowledged one, whether a process has it open

One process opens the file: SQLite locks it exclusively, so that WAL needs no memory which processes share.
What is damaged is refused and never repaired: a gap in the numbers, a row or a stamp with a wrong checksum, a
log that is gone although the last process had no time to close the file.
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import msgspec

from slipstream.rollout.ledger.storage.database import BrokenSeal, log_of, sealed, unsealed
from slipstream.rollout.ledger.storage.locks import fcntl_error
from slipstream.rollout.live.gateway_messages import crc_of_entry
from slipstream.rollout.system.durable import sync_folder
from slipstream.rollout.system.frames import UNREADABLE
from slipstream.rollout.tokens.turn_entries import (
    KINDS,
    Entry,
    Forgotten,
    HeldReward,
    NextState,
    Opened,
    SessionEnd,
    Turn,
    UserReward,
    chunk_of,
    decode_entry,
    encode_entry,
)

FORMAT = 1

TURN, END = KINDS.index(Turn), KINDS.index(SessionEnd)

TABLES = f"""
CREATE TABLE stamp (                -- one row
    id INTEGER PRIMARY KEY CHECK (id = 1),
    data BLOB NOT NULL              -- sealed
) STRICT;
CREATE TABLE entries (
    number INTEGER PRIMARY KEY,     -- from 1, without gaps after the last acknowledged one
    kind INTEGER NOT NULL,          -- turn_entries.KINDS
    session TEXT,                   -- NULL: the entry goes as soon as it is acknowledged
    key TEXT,                       -- name of the API key
    data BLOB NOT NULL,             -- turn_entries.encode_entry
    chunk BLOB NOT NULL,
    crc INTEGER NOT NULL
) STRICT;
CREATE INDEX entries_session ON entries (session) WHERE session IS NOT NULL;
CREATE INDEX entries_end ON entries (number) WHERE kind = {END}
"""

READ_BYTES = 8 * 2**20
"""Bytes from which on ``rows`` reads no more at one time."""


class JournalError(RuntimeError):
    """The journal cannot be read or written. The message says why and what to do."""


class JournalBusy(JournalError):
    """Another process has the journal open."""


class DamagedJournal(JournalError):
    """The journal cannot be used as it is, whenever it is opened. The message says what is wrong with it."""


class Row(NamedTuple):
    """One stored entry."""

    number: int
    kind: int
    data: bytes
    chunk: bytes
    crc: int

    def entry(self) -> Entry:
        """Return the entry. Raises CorruptRecord."""
        return decode_entry(self.kind, self.data, self.chunk)


class JournalStamp(msgspec.Struct, array_like=True, frozen=True):
    """The state of the whole journal."""

    format: int
    identity: str
    """Name under which the driver knows this file, and no other one that ever had its place."""
    last: int = 0
    """Number of the last entry."""
    acknowledged: int = 0
    """The driver has all entries up to this number. The file has all entries after it."""
    is_open: bool = False
    """A process has the file open, or ended without closing it."""


_STAMP = msgspec.msgpack.Decoder(JournalStamp)


class JournalFile:
    """An open journal. One thread at a time uses it."""

    def __init__(self, path: Path, connection: sqlite3.Connection, stamp: JournalStamp) -> None:
        self.path = path
        self._connection = connection
        self.stamp = stamp

    @classmethod
    def open(cls, path: Path, name: str) -> "JournalFile":
        """Open the journal of the gateway called ``name``, and make it if there is none.

        Raises JournalError for a file that is damaged, and JournalBusy while another process has it open.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if (refusal := fcntl_error(path.parent)) is not None:
            raise DamagedJournal(
                f"{path.parent}: files cannot be locked here ({refusal}), so that nothing keeps two gateways "
                "out of one journal: mount the file system with locks, or put run.root on another one"
            )
        try:
            if not path.exists():
                _create(path, JournalStamp(FORMAT, f"{name}.{uuid4().hex[:12]}"))
            if not path.stat().st_size:
                raise DamagedJournal(f"{path} is empty: {way_out(path)}")
            had_log = log_of(path).exists()
            connection = _connect(path)
        except (sqlite3.Error, OSError) as error:
            raise explained(path, error) from error
        try:
            file = cls(path, connection, _read_stamp(connection, path))
            file._check(had_log)
            file._mark_open()
        except (sqlite3.Error, OSError) as error:
            connection.close()
            raise explained(path, error) from error
        except BaseException:
            connection.close()
            raise
        return file

    def append(self, first: int, entries: Iterable[Entry], acknowledged: int) -> None:
        """Store entries, the first of which has the number ``first``. Durable when this returns."""
        rows: list[tuple[object, ...]] = []
        about_turns: list[tuple[object, ...]] = []
        forgotten: list[tuple[int, Forgotten]] = []
        number = first - 1
        for number, entry in enumerate(entries, first):
            kind, data = encode_entry(entry)
            chunk = chunk_of(entry)
            crc = crc_of_entry(number, kind, data, chunk)
            match entry:
                case Turn():
                    rows.append((number, kind, entry.session, entry.key, data, chunk, crc))
                case SessionEnd() | Opened() | HeldReward():
                    rows.append((number, kind, entry.session, entry.key, data, chunk, crc))
                case NextState() | UserReward():
                    about_turns.append((number, kind, entry.turn, entry.turn, data, chunk, crc))
                case Forgotten():
                    rows.append((number, kind, None, None, data, chunk, crc))
                    forgotten.append((number, entry))
        execute = self._connection.executemany
        with self._transaction(last=number, acknowledged=acknowledged):
            execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            execute(
                "INSERT INTO entries VALUES (?, ?, (SELECT session FROM entries WHERE number = ?), "
                "(SELECT key FROM entries WHERE number = ?), ?, ?, ?)",
                about_turns,
            )
            for number, entry in forgotten:
                self._forget(number, entry, acknowledged)
        if forgotten:
            self._clear_log()

    def tidy(self, acknowledged: int) -> None:
        """Delete what nobody needs: acknowledged entries of sessions that have ended."""
        with self._transaction(acknowledged=acknowledged):
            execute = self._connection.execute
            ended: list[tuple[str, str, int]] = execute(
                f"SELECT session, key, number FROM entries WHERE kind = {END} AND number <= ?",
                (acknowledged,),
            ).fetchall()
            self._connection.executemany(
                "DELETE FROM entries WHERE session = ? AND key = ? AND number <= ?", ended
            )
            # An entry after the end of its session, such as a late reward, has no other end to wait for. But
            # if a client has gone on under the name of the session, its entries wait for the next end.
            self._connection.executemany(
                "UPDATE entries SET session = NULL WHERE session = :session AND key = :key AND NOT EXISTS "
                f"(SELECT 1 FROM entries WHERE session = :session AND key = :key AND kind = {TURN})",
                [{"session": session, "key": key} for session, key, _ in ended],
            )
            execute("DELETE FROM entries WHERE session IS NULL AND number <= ?", (acknowledged,))

    def rows(self, after: int, most_bytes: int = READ_BYTES) -> list[Row]:
        """Return the entries after number ``after``, in order, about ``most_bytes`` of them.

        Raises JournalError for a damaged row.
        """
        found: list[Row] = []
        size = 0
        cursor = self._connection.execute(
            "SELECT number, kind, data, chunk, crc FROM entries WHERE number > ? ORDER BY number", (after,)
        )
        for values in cursor:
            row = Row(*values)
            if crc_of_entry(row.number, row.kind, row.data, row.chunk) != row.crc:
                cursor.close()
                raise DamagedJournal(f"{self.path}: entry {row.number} is damaged: {way_out(self.path)}")
            found.append(row)
            size += len(row.data) + len(row.chunk)
            if size >= most_bytes:
                break
        cursor.close()
        return found

    def close(self) -> None:
        """Close the file in an orderly way."""
        with self._transaction(is_open=False):
            pass
        self._connection.close()

    # ---- the parts of it

    def _forget(self, number: int, entry: Forgotten, acknowledged: int) -> None:
        """Remove the content of all entries of a session, a key, or a session of a key before ``number``.

        The driver waits for the numbers of those that it does not have: each becomes a copy of ``entry``.
        """
        named = {name: value for name in ("session", "key") if (value := getattr(entry, name)) is not None}
        if not named:
            return
        condition = " AND ".join(f"{name} = :{name}" for name in named)
        found: list[tuple[int]] = self._connection.execute(
            f"SELECT number FROM entries WHERE {condition} AND number < :number", {**named, "number": number}
        ).fetchall()
        numbers = [n for (n,) in found]
        self._connection.executemany(
            "DELETE FROM entries WHERE number = ?", [(n,) for n in numbers if n <= acknowledged]
        )
        kind, data = encode_entry(entry)
        self._connection.executemany(
            "UPDATE entries SET kind = ?, session = NULL, key = NULL, data = ?, chunk = x'', crc = ? "
            "WHERE number = ?",
            [(kind, data, crc_of_entry(n, kind, data, b""), n) for n in numbers if n > acknowledged],
        )

    def _clear_log(self) -> None:
        """Empty SQLite's log, which holds what was overwritten in the file."""
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _mark_open(self) -> None:
        with self._transaction(is_open=True):
            pass
        self._clear_log()  # the mark must be in the file itself, in case the log is lost

    @contextmanager
    def _transaction(self, **changes: int | bool) -> Iterator[None]:
        """Commit what the block writes, together with the changed stamp."""
        connection = self._connection
        stamp = msgspec.structs.replace(self.stamp, **changes)
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("UPDATE stamp SET data = ?", (_sealed_stamp(stamp),))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
            raise
        self.stamp = stamp

    def _check(self, had_log: bool) -> None:
        """Raise JournalError for damage."""
        stamp, connection = self.stamp, self._connection
        for problem in self._problems(had_log):
            raise DamagedJournal(f"{self.path}: {problem}: {way_out(self.path)}")
        kept, last = connection.execute(
            "SELECT count(*), coalesce(max(number), 0) FROM entries WHERE number > ?", (stamp.acknowledged,)
        ).fetchone()
        if kept != stamp.last - stamp.acknowledged or last not in (0, stamp.last):
            raise DamagedJournal(
                f"{self.path}: {kept} entries after number {stamp.acknowledged}, expected "
                f"{stamp.last - stamp.acknowledged}: {way_out(self.path)}"
            )
        number = 0
        while rows := self.rows(number):
            number = rows[-1].number

    def _problems(self, had_log: bool) -> Iterator[str]:
        if self.stamp.is_open and not had_log:
            yield f"it was not closed, and {log_of(self.path).name} is gone, which holds its last entries"
        problems: Sequence[tuple[str]] = self._connection.execute("PRAGMA quick_check(5)").fetchall()
        if problems != [("ok",)]:
            yield "; ".join(problem for (problem,) in problems)


def way_out(path: Path) -> str:
    """Return what to do about a journal that cannot be used."""
    return (
        f"restore the file from a copy, or move it away together with {log_of(path).name}: the gateway then "
        "begins a new journal, without the conversations of this one and without the turns that the driver "
        "has not acknowledged"
    )


def explained(path: Path, error: Exception) -> JournalError:
    """Return a failure of SQLite or of the disk as an error that tells the user what to do."""
    text = " ".join(str(error).split())
    if "locked" in text:
        return JournalBusy(
            f"{path}: {text}: another process has this journal open; every gateway process has its own: "
            "end the other process, or wait for its end"
        )
    if "malformed" in text or "not a database" in text or "no such" in text or "no more rows" in text:
        return DamagedJournal(f"{path}: {text}: the file is damaged: {way_out(path)}")
    if "full" in text or "No space" in text or "quota" in text or "disk I/O" in text:
        return JournalError(f"{path}: {text}: make room on its disk, and start the gateway again")
    return JournalError(f"{path}: {text}: check the file's permissions and its disk; else {way_out(path)}")


def _create(path: Path, stamp: JournalStamp) -> None:
    """Make the file, complete or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    connection = sqlite3.connect(draft, isolation_level=None)
    try:
        connection.execute("BEGIN")
        for statement in TABLES.split(";\n"):
            connection.execute(statement)
        connection.execute("INSERT INTO stamp VALUES (1, ?)", (_sealed_stamp(stamp),))
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode=WAL")
    finally:
        connection.close()
    with suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()
    sync_folder(path.parent)


def _connect(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=rw"
    connection = sqlite3.connect(uri, uri=True, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA secure_delete=ON")  # what is forgotten must not stay in free pages
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _read_stamp(connection: sqlite3.Connection, path: Path) -> JournalStamp:
    row: tuple[bytes] | None = connection.execute("SELECT data FROM stamp").fetchone()
    try:
        stamp = _STAMP.decode(unsealed(row[0] if row else b""))
    except (BrokenSeal, *UNREADABLE) as error:
        raise DamagedJournal(f"{path}: its stamp is damaged ({error}): {way_out(path)}") from error
    if stamp.format != FORMAT:
        raise DamagedJournal(
            f"{path} has the format {stamp.format}, expected {FORMAT}: open it with the version that wrote it"
        )
    return stamp


def _sealed_stamp(stamp: JournalStamp) -> bytes:
    return sealed(msgspec.msgpack.encode(stamp))
