"""The ledger's file: its tables, how it is opened, and what its errors mean. SQLite in WAL mode.

The writer locks the file exclusively. So a second driver of the same run is refused, and WAL needs no memory
that processes share, which network file systems do not have. Where a file cannot be locked at all, SQLite is
told not to try: then the lease of the run folder (``lease.py``) alone keeps processes apart.
"""

import os
import sqlite3
from pathlib import Path

from slipstream.rollout.ledger.locks import fcntl_error

FORMAT = 2

TABLES = """
CREATE TABLE meta (
    key TEXT PRIMARY KEY,           -- format, batch_size, n_samples_per_prompt
    value INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE epochs (               -- one row per start of the run: Restart in control/versions.py
    epoch INTEGER PRIMARY KEY,
    restored INTEGER NOT NULL,
    version INTEGER NOT NULL,
    step INTEGER NOT NULL,          -- training steps behind the restored version
    bound INTEGER NOT NULL,         -- rollout.max_head_offpolicyness
    began TEXT NOT NULL,
    process TEXT NOT NULL           -- host:pid
);
CREATE TABLE steps (                -- one row per version that was begun, whose number is taken for good
    version INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,
    step INTEGER NOT NULL,
    published INTEGER NOT NULL      -- 0 while it is unknown which engines have the version
);
CREATE TABLE groups (               -- one row per group
    id INTEGER PRIMARY KEY,
    position INTEGER NOT NULL,      -- of its prompt in the endless order of the prompt set
    requeued_from INTEGER,          -- the expired group whose prompt was requeued; NULL for a fresh prompt
    version INTEGER NOT NULL,       -- policy version at the latest admission
    epoch INTEGER NOT NULL,         -- of the latest admission
    state TEXT NOT NULL,            -- admitted, ready, trained, filtered, expired, failed
    loss TEXT,                      -- reason why it was not trained: Loss in control/core.py
    step INTEGER,                   -- version that was trained on it
    tokens INTEGER                  -- sampled tokens of all trajectories; NULL until it is ready or has ended
);
CREATE INDEX groups_that_go_on ON groups (state) WHERE state IN ('admitted', 'ready');
CREATE INDEX groups_by_step ON groups (step) WHERE step IS NOT NULL;
CREATE TABLE trajectories (         -- complete and judged; removed when no restart can need them any more
    key INTEGER PRIMARY KEY,        -- group id * 2^16 + sample
    epoch INTEGER NOT NULL,         -- whose version numbers the payload has
    tokens INTEGER NOT NULL,        -- that carry loss
    payload BLOB NOT NULL
);
CREATE TABLE partials (             -- completions of open groups, partial or whole
    key INTEGER NOT NULL,           -- as in trajectories
    call INTEGER NOT NULL,          -- number of the request within the episode, from 0
    epoch INTEGER NOT NULL,
    input BLOB NOT NULL,            -- digest of the request's token ids
    done INTEGER NOT NULL,          -- 1: the completion is whole
    tokens INTEGER NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (key, call)
) WITHOUT ROWID;
CREATE TABLE trainings (            -- every training of every group, also if a restart has undone it
    version INTEGER NOT NULL,       -- that was trained
    group_id INTEGER NOT NULL,
    head_lag INTEGER NOT NULL,      -- -1: no token was trained
    tokens INTEGER NOT NULL,        -- that carried loss
    masked INTEGER NOT NULL,        -- sampled tokens that were too old to carry loss
    PRIMARY KEY (version, group_id)
) WITHOUT ROWID;
CREATE TABLE discards (             -- tokens that a restart gave up of groups that start again
    group_id INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    tokens INTEGER NOT NULL
);
"""


class LedgerError(RuntimeError):
    """The ledger cannot be read or written. The message says why and what to do. The file is as it was."""


class LedgerBusy(LedgerError):
    """The ledger is open in another process: the run is running."""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open the file for its only writer, and create it if it does not exist. Raises LedgerError."""
    try:
        new = not path.exists() or path.stat().st_size == 0
        connection = _connect(path, "mode=rwc")
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        if new:
            # A page holds several trajectories of a few hundred tokens: half the bytes of smaller pages.
            connection.execute("PRAGMA page_size=32768")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA wal_autocheckpoint=2048")
        connection.execute("BEGIN IMMEDIATE")
        if not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            for statement in TABLES.split(";\n"):
                connection.execute(statement)
            connection.execute("INSERT INTO meta VALUES ('format', ?)", (FORMAT,))
        connection.execute("COMMIT")
    except (sqlite3.Error, OSError) as error:
        raise explained(path, error) from error
    check_format(connection, path)
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open the file of a run that is not running. Raises LedgerError."""
    if not path.exists():
        raise LedgerError(f"{path} does not exist: give the folder of a run, which has this file")
    try:
        # SQLite writes even to read a file in WAL mode, unless the file is declared immutable.
        archived = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
        connection = _connect(path, "immutable=1" if archived else "mode=rw")
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    except (sqlite3.Error, OSError) as error:
        raise explained(path, error) from error
    check_format(connection, path)
    return connection


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    without_locks = fcntl_error(path.parent) is not None
    uri = f"{path.absolute().as_uri()}?{mode}{'&vfs=unix-none' * without_locks}"
    connection = sqlite3.connect(uri, uri=True, timeout=2, isolation_level=None, check_same_thread=False)
    if without_locks:
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    return connection


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raise LedgerError unless the file is a ledger in the present format."""
    try:
        row: tuple[int] | None = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    except sqlite3.Error as error:
        raise explained(path, error) from error
    if row is None or row[0] != FORMAT:
        present = "none" if row is None else row[0]
        raise LedgerError(
            f"{path} has the format {present}, expected {FORMAT}: read it with the version that wrote it"
        )


def explained(path: Path, error: Exception) -> LedgerError:
    """Return a failure of SQLite as an error that tells the user what to do."""
    text = str(error)
    if "locked" in text:
        return LedgerBusy(
            f"{path}: {text}: another process is running this run or reading the file: "
            "wait for its end, or end it"
        )
    if "full" in text or "No space" in text:
        advice = "the disk is full: make room, then go on with `slipstream train RECIPE --resume`"
    elif "readonly" in text or "unable to open" in text or isinstance(error, PermissionError):
        advice = "the run folder cannot be written to: check its permissions and its mount"
    elif "disk I/O" in text:
        advice = "the disk failed (full, or a limit on file sizes): make room, then go on with --resume"
    elif "malformed" in text or "not a database" in text:
        advice = "the file is damaged: restore it from a copy, or start the run anew under another name"
    else:
        advice = "all events that were acknowledged before are still in it"
    return LedgerError(f"{path}: {text}: {advice}")
