"""The ledger's database: its tables, how it is opened, and what its errors mean. SQLite in WAL mode.

The writer locks the file exclusively. So a second driver of the same run is refused, and WAL needs no memory
that processes share, which network file systems do not have. Where a file cannot be locked at all, SQLite is
told not to try: then the lease of the run folder (``folder_lease.py``) alone keeps processes apart.

SQLite notices damage to the structure of its file, but not to the values in it. So each row carries a
checksum: either SQLite computes the column ``checksum`` from the numbers of the row whenever these change, or
a BLOB of the row is ``sealed``.
"""

import os
import re
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from slipstream.rollout.ledger.storage.locks import fcntl_error
from slipstream.rollout.system.disk import ADVICE
from slipstream.rollout.system.durable import sync_folder

LEDGER = "ledger.sqlite"
"""Name of the ledger's file in the run folder."""

FORMAT = 7

PAGE_BYTES = 1024
"""Size of a page. A commit writes a few pages, however little has changed on each."""

STATES = ("admitted", "ready", "trained", "filtered", "expired", "failed")
"""States of a group. The first two go on, the others are ends."""

TURN_STATES = (
    *("waiting", "unjudged", "ready"),
    *("trained", "side", "filtered", "expired", "failed", "cancelled", "forgotten", "unpaired"),
)
"""States of a turn of a live user. The first three go on, the others are ends."""

PRIME = 16_777_213
"""Checksums are smaller than this number, and so take three bytes."""


def _checksum(*columns: str) -> str:
    """Return the SQL expression of a checksum over columns of integers. Any change of one bit changes it."""
    terms = (
        f"ifnull({column}, {PRIME - 1 - 2 * number}) % {PRIME} * {2 * number + 3}"
        for number, column in enumerate(columns)
    )
    return f"(({' + '.join(terms)}) % {PRIME})"


CHECKSUMS = {
    "epochs": ("epoch", _checksum("epoch", "restored", "step", "bound")),
    "versions": ("version", _checksum("version", "parent", "epoch", "copy", "published")),
    "groups": (
        "id",
        _checksum(
            "id",
            "position",
            "requeued_from",
            "version",
            "epoch",
            f"instr('{' '.join(STATES)}', state)",
            "unicode(loss) * 31 + length(loss)",
            "step",
            "tokens",
            "since",
        ),
    ),
    "discards": ("group_id", _checksum("group_id", "epoch", "tokens")),
    "failures": ("version", _checksum("version", "epoch")),
    "segments": ("segment", _checksum("segment", "first_row")),
    "gateways": ("id", _checksum("id", "unicode(name)", "length(name)", "durable")),
    "sessions": ("id", _checksum("id", "ended")),
    "turns": (
        "id",
        _checksum(
            "id",
            "session",
            "key",
            "parent",
            f"instr('{' '.join(TURN_STATES)}', state)",
            "unicode(loss) * 31 + length(loss)",
            "step",
            "sampled",
            "version",
            "lag",
            "gone",
        ),
    ),
    "checkpoints": ("version", _checksum("version", "epoch", "unicode(digest)", "length(digest)")),
}
"""The tables whose rows have a checksum of their own: the column that names a row, and the expression."""


def _column(table: str) -> str:
    return f"checksum INTEGER GENERATED ALWAYS AS {CHECKSUMS[table][1]} STORED"


TABLES = f"""
CREATE TABLE stamp (                -- one row: stamp.py. The first table: write_ahead_log.py knows its page
    id INTEGER PRIMARY KEY CHECK (id = 1),
    data BLOB NOT NULL
) STRICT;
CREATE TABLE meta (
    key TEXT PRIMARY KEY,           -- format, run (a UUID), batch_size, n_samples_per_prompt
    value ANY NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE epochs (               -- one row per start of the run
    epoch INTEGER PRIMARY KEY,
    restored INTEGER NOT NULL,      -- version whose weights the epoch began with
    step INTEGER NOT NULL,          -- number of training steps that led to that version
    bound INTEGER NOT NULL,         -- rollout.max_head_offpolicyness
    began TEXT NOT NULL,
    process TEXT NOT NULL,          -- host:pid
    {_column("epochs")}
) STRICT;
CREATE TABLE versions (             -- one row per version that was begun, whose number is taken for good
    version INTEGER PRIMARY KEY,
    parent INTEGER NOT NULL,        -- version whose weights its update starts from
    epoch INTEGER NOT NULL,
    copy INTEGER NOT NULL,          -- 1: no update has made it, its weights are those of its parent
    published INTEGER NOT NULL,     -- 0 while it is unknown which engines have the version
    {_column("versions")}
) STRICT;
CREATE TABLE batches (              -- the batch of each version that was begun by a training step: of no copy
    version INTEGER PRIMARY KEY,
    groups BLOB NOT NULL            -- sealed: ids of the groups, and of turns (below 0), packed as i8
) STRICT;
CREATE TABLE failures (             -- training steps in which the trainer died or raised
    version INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    reason TEXT NOT NULL,
    {_column("failures")}
) STRICT;
CREATE TABLE groups (               -- one row per group
    id INTEGER PRIMARY KEY,
    position INTEGER NOT NULL,      -- of its prompt in the endless order of the prompt set
    requeued_from INTEGER,          -- the expired group whose prompt was requeued; NULL for a fresh prompt
    version INTEGER NOT NULL,       -- policy version at the latest admission
    epoch INTEGER NOT NULL,         -- of the latest admission
    state TEXT NOT NULL,            -- admitted, ready, trained, filtered, expired, failed
    loss TEXT,                      -- reason why it was not trained: Loss in control/ends.py
    step INTEGER,                   -- version that was trained on it
    tokens INTEGER,                 -- sampled tokens of all trajectories; NULL until it is ready or has ended
    since INTEGER NOT NULL,         -- rows of samples below this one are void: the group has started again
    note TEXT,                      -- what went wrong with a group that has failed
    {_column("groups")}
) STRICT;
CREATE TABLE samples (              -- what was generated, in order of arrival: samples.py
    id INTEGER PRIMARY KEY,         -- counts up over the whole life of the run
    key INTEGER NOT NULL,           -- group id * 2^16 + sample
    state INTEGER NOT NULL,         -- 0: a piece, 1: answered, 2: judged, 3: void
    base INTEGER NOT NULL,          -- number of the piece; pieces from it on are void. -1: of no piece
    refs BLOB,                      -- record.REF of each chunk. NULL: as before
    header BLOB NOT NULL            -- sealed, together with the other columns
) STRICT;
CREATE TABLE segments (             -- the files of payload that are needed: segments.py
    segment INTEGER PRIMARY KEY,
    first_row INTEGER,              -- rows of samples from this one on were written while it was the newest
    {_column("segments")}
) STRICT;
CREATE TABLE trainings (            -- every training of a group or a turn, also if a restart has undone it
    version INTEGER NOT NULL,       -- that was trained
    group_id INTEGER NOT NULL,      -- below 0: of a turn
    head_lag INTEGER NOT NULL,      -- -1: no token was trained
    tokens INTEGER NOT NULL,        -- that carried loss
    masked INTEGER NOT NULL,        -- sampled tokens that were too old to carry loss
    versions BLOB NOT NULL,         -- sealed: versions and numbers of tokens that carried loss, as i8
    PRIMARY KEY (version, group_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE discards (             -- tokens that a restart gave up of groups that start again
    group_id INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    {_column("discards")}
) STRICT;
CREATE TABLE gateways (             -- stored_turns.py
    id INTEGER PRIMARY KEY,         -- from 1 on
    name TEXT NOT NULL,
    durable INTEGER NOT NULL,       -- number of the last entry of its journal that is in the ledger
    {_column("gateways")}
) STRICT;
CREATE TABLE sessions (             -- of live users, of which anything may still be needed
    id INTEGER PRIMARY KEY,         -- digest of its name and key
    ended INTEGER NOT NULL,         -- 1: no further turn follows
    {_column("sessions")}
) STRICT;
CREATE TABLE turns (                -- one row per turn of a live user
    id INTEGER PRIMARY KEY,         -- -(gateway * 2^40 + number of the entry)
    session INTEGER NOT NULL,       -- digest of its name and key
    key INTEGER NOT NULL,           -- digest of the name of the API key
    parent INTEGER,                 -- turn that this one continues
    state TEXT NOT NULL,            -- waiting, unjudged, ready, or an end: TurnEnd of control/live_door.py
    loss TEXT,                      -- reason why it was not trained, if it was filtered, expired or failed
    step INTEGER,                   -- version that was trained on it
    sampled INTEGER NOT NULL,       -- sampled tokens
    version INTEGER,                -- version that was served when it expired
    lag INTEGER,                    -- smallest lag of its tokens then
    gone INTEGER NOT NULL,          -- its payload. 0: kept, 1: not needed, 2: forgotten, to be written over
    head BLOB NOT NULL,             -- sealed: TurnHead
    verdict BLOB,                   -- sealed: VerdictRow
    chunk BLOB,                     -- record.REF of its tokens; NULL: they were written over
    said BLOB,                      -- record.REF of the messages of request and answer
    next BLOB,                      -- record.REF of the messages that came after it
    hint BLOB,                      -- record.REF of the hint of its verdict
    teacher BLOB,                   -- record.REF of a teacher's scores of its sampled tokens
    note TEXT,                      -- what went wrong
    {_column("turns")}
) STRICT;
CREATE INDEX turns_of_session ON turns (session);
CREATE TABLE checkpoints (          -- one row per committed checkpoint: watermark.py
    version INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,
    digest TEXT NOT NULL,           -- of the checkpoint's record
    {_column("checkpoints")}
) STRICT;
"""


FAILURES = (sqlite3.Error, OSError, UnicodeDecodeError)
"""Errors of SQLite and of the disk. The last one comes from damaged files, whose text is no UTF-8."""


class LedgerError(RuntimeError):
    """The ledger cannot be read or written. The message says why and what to do; nothing has changed."""


class LedgerBusy(LedgerError):
    """The ledger is open in another process: the run is running."""


RESTORE = "restore the run folder from a copy, or start the run anew under another name"


def _statements() -> list[str]:
    return [statement for statement in TABLES.split(";\n") if statement.strip()]


def _bare(sql: str) -> str:
    """Return a statement without comments and line breaks."""
    return " ".join(re.sub(r"--[^\n]*", "", sql).split())


# ---- opening


def create_database(path: Path, run: str, stamp: bytes) -> None:
    """Make the file of a new run, complete or not at all. Raises LedgerError.

    A file that exists already is left as it is: so an empty one is always a damaged one.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        connection = _connect(draft, "mode=rwc")
        try:
            connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
            connection.execute("BEGIN")
            for statement in _statements():
                connection.execute(statement)
            connection.execute("INSERT INTO stamp VALUES (1, ?)", (stamp,))
            connection.executemany("INSERT INTO meta VALUES (?, ?)", [("format", FORMAT), ("run", run)])
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode=WAL")
        finally:
            connection.close()
        _give_name(draft, path)
    except FAILURES as error:
        raise explained(path, error) from error


def _give_name(draft: Path, path: Path) -> None:
    """Give a file its name, unless there is a file of this name."""
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    except OSError:  # a file system without hard links
        if not path.exists():
            draft.rename(path)
    sync_folder(path.parent)


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open the file for its only writer. Raises LedgerError."""
    try:
        connection = _connect(path, "mode=rw")
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA wal_autocheckpoint=0")  # Store.tidy does it
        connection.execute("PRAGMA secure_delete=OFF")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("COMMIT")
    except FAILURES as error:
        raise explained(path, error) from error
    check_format(connection, path)
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open the file of a run that is not running. Raises LedgerError."""
    if not exists(path):
        raise LedgerError(f"{path} does not exist: give the folder of a run, which has this file")
    log = log_of(path)
    if log.exists():
        mode = "mode=ro"  # SQLite would write the log back when it closes the file, damaged or not
    elif os.access(path.parent, os.W_OK):
        mode = "mode=rw"  # a reader of a file in WAL mode must be able to remove the log that it makes
    else:
        mode = "immutable=1"  # the ledger of an archived run
    try:
        connection = _connect(path, mode)
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    except FAILURES as error:
        raise explained(path, error) from error
    check_format(connection, path)
    return connection


def open_without_log(path: Path) -> sqlite3.Connection:
    """Open the file as it is without its write-ahead log, and without taking or losing any lock."""
    return _connect(path, "immutable=1")


def log_of(path: Path) -> Path:
    """Return SQLite's write-ahead log of a file."""
    return path.with_name(f"{path.name}-wal")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    without_locks = fcntl_error(path.parent) is not None
    uri = f"{path.absolute().as_uri()}?{mode}{'&vfs=unix-none' * without_locks}"
    connection = sqlite3.connect(uri, uri=True, timeout=2, isolation_level=None, check_same_thread=False)
    if without_locks:
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    return connection


# ---- checks


def exists(path: Path) -> bool:
    """True if there is a ledger at ``path``. Raises LedgerError when that cannot be seen.

    An empty file is refused, too: SQLite would take it for a new one.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return False
    except OSError as error:
        raise explained(path, error) from error
    if not size:
        raise LedgerError(f"{path} is empty: the file is damaged: {RESTORE}")
    return True


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raise LedgerError unless the file is a ledger in the present format."""
    try:
        row: tuple[int] | None = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    except FAILURES as error:
        raise explained(path, error) from error
    if row is None or row[0] != FORMAT:
        present = "none" if row is None else row[0]
        raise LedgerError(
            f"{path} has the format {present}, expected {FORMAT}: read it with the version that wrote it"
        )


def damage(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield what is wrong with the file itself: its structure, and rows that do not fit their checksum."""
    schema: list[tuple[str]] = connection.execute(
        "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL"
    ).fetchall()
    if sorted(_bare(sql) for (sql,) in schema) != sorted(map(_bare, _statements())):
        yield "its tables are not those of a ledger"
        return
    problems: list[str] = [row[0] for row in connection.execute("PRAGMA integrity_check(5)")]
    if problems != ["ok"]:
        yield "; ".join(problems)
        return
    for table, (name, expression) in CHECKSUMS.items():
        rows: list[tuple[int]] = connection.execute(
            f"SELECT {name} FROM {table} WHERE checksum IS NOT {expression} LIMIT 5"
        ).fetchall()
        if rows:
            yield f"table {table}: wrong checksum of {name} {', '.join(str(row[0]) for row in rows)}"


def check_undamaged(connection: sqlite3.Connection, path: Path) -> None:
    """Raise LedgerError when the file itself is damaged."""
    for problem in damage(connection):
        raise LedgerError(f"{path}: {problem}: the file is damaged: {RESTORE}")


_DAMAGE = ("malformed", "not a database", "decode", "no such", "unsupported file format")
"""Words of errors that mean that a file is damaged."""


def explained(path: Path, error: Exception) -> LedgerError:
    """Return a failure of SQLite or of the disk as an error that tells the user what to do."""
    text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    text = " ".join(text.split())
    if "locked" in text:
        return LedgerBusy(
            f"{path}: {text}: another process is running this run or reading the file: "
            "wait for its end, or end it"
        )
    if isinstance(error, OSError) and error.errno in ADVICE:
        advice = f"{ADVICE[error.errno]}; `slipstream train RECIPE --resume` goes on"
    elif "full" in text or "quota" in text:
        advice = "the disk is full: make room, then go on with `slipstream train RECIPE --resume`"
    elif "readonly" in text or "unable to open" in text or isinstance(error, PermissionError):
        advice = "the run folder cannot be written to: check its permissions and its mount"
    elif "Read-only" in text:
        advice = "the file system is mounted read-only: remount it, or put run.root elsewhere"
    elif "disk I/O" in text or "too large" in text or "Input/output" in text:
        advice = "the disk failed (full, or a limit on file sizes): make room, then go on with --resume"
    elif any(word in text for word in _DAMAGE):
        advice = f"the file is damaged: {RESTORE}"
    else:
        advice = (
            "all events that were acknowledged before are still in it: go on with `slipstream train RECIPE "
            f"--resume`, or {RESTORE}"
        )
    return LedgerError(f"{path}: {text}: {advice}")


# ---- sealed BLOBs


class BrokenSeal(ValueError):
    """A sealed BLOB does not have the checksum that it carries."""


def sealed(data: bytes, start: int = 0) -> bytes:
    """Return ``data`` followed by its CRC-32. ``start`` stands for other values that are protected."""
    return data + zlib.crc32(data, start).to_bytes(4, "little")


def unsealed(blob: bytes, start: int = 0) -> bytes:
    """Return the data of a sealed BLOB. Raises BrokenSeal."""
    data = blob[:-4]
    if zlib.crc32(data, start) != int.from_bytes(blob[-4:], "little") or len(blob) < 4:
        raise BrokenSeal(f"a BLOB of {len(blob)} bytes does not have the checksum that it carries")
    return data


def crc_of(*numbers: int) -> int:
    """Return the CRC-32 of numbers, for ``start`` of a seal."""
    return zlib.crc32(",".join(map(str, numbers)).encode())


def few(items: Sequence[object], shown: int = 5) -> str:
    """Return the first of ``items`` as a text."""
    return ", ".join(map(str, items[:shown])) + (", ..." if len(items) > shown else "")
