"""The ledger's file: its tables, and how it is opened. SQLite in WAL mode.

The writer holds the file exclusively. So a second driver of the same run is refused, and WAL needs no shared
memory between processes, which network file systems do not have.
"""

import os
import sqlite3
from pathlib import Path

FORMAT = 2

TABLES = """
CREATE TABLE meta (
    key TEXT PRIMARY KEY,           -- format, batch_size, n_samples_per_prompt
    value INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE epochs (               -- one row per start of the run: rollout.control.versions.Restart
    epoch INTEGER PRIMARY KEY,
    restored INTEGER NOT NULL,
    version INTEGER NOT NULL,
    step INTEGER NOT NULL,          -- training steps done by the restored version
    bound INTEGER NOT NULL,         -- rollout.max_head_offpolicyness
    began TEXT NOT NULL,
    process TEXT NOT NULL           -- host:pid
);
CREATE TABLE steps (                -- one row per version that was begun; it takes its number for good
    version INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,
    step INTEGER NOT NULL,
    published INTEGER NOT NULL      -- 0 while engines may or may not have it
);
CREATE TABLE groups (               -- one row per prompt instance
    id INTEGER PRIMARY KEY,
    position INTEGER NOT NULL,      -- in the endless order of the prompt set
    requeued_from INTEGER,          -- the expired group whose prompt this is, if it is not the prompt's first
    version INTEGER NOT NULL,       -- at its latest admission
    epoch INTEGER NOT NULL,         -- of that
    state TEXT NOT NULL,            -- admitted, ready, trained, filtered, expired, failed
    loss TEXT,                      -- why it was not trained: rollout.control.core.Loss
    step INTEGER,                   -- the version that came of training it
    tokens INTEGER                  -- sampled ones, all trajectories, once it has ended or is ready
);
CREATE INDEX groups_that_go_on ON groups (state) WHERE state IN ('admitted', 'ready');
CREATE INDEX groups_by_step ON groups (step) WHERE step IS NOT NULL;
CREATE TABLE trajectories (         -- finished and judged, until no checkpoint could ask for them again
    key INTEGER PRIMARY KEY,        -- group id * 2^16 + sample
    epoch INTEGER NOT NULL,         -- whose version numbers the payload has
    tokens INTEGER NOT NULL,
    payload BLOB NOT NULL
);
CREATE TABLE partials (             -- answers of open groups, complete ones included
    key INTEGER NOT NULL,           -- as above
    call INTEGER NOT NULL,          -- the how many-th request of the episode
    epoch INTEGER NOT NULL,
    input BLOB NOT NULL,            -- digest of what was asked
    done INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (key, call)
) WITHOUT ROWID;
CREATE TABLE trainings (            -- every training of every group, lost ones included
    version INTEGER NOT NULL,       -- that came of it
    group_id INTEGER NOT NULL,
    head_lag INTEGER NOT NULL,      -- -1: no token was trained
    tokens INTEGER NOT NULL,        -- that carried loss
    masked INTEGER NOT NULL,        -- sampled tokens that did not, because they were too old
    PRIMARY KEY (version, group_id)
) WITHOUT ROWID;
CREATE TABLE discards (             -- tokens given up although their group goes on
    group_id INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    tokens INTEGER NOT NULL
);
"""


class LedgerError(RuntimeError):
    """The ledger cannot be read or written; the message says why and what to do. What is in it stays."""


class LedgerBusy(LedgerError):
    """Another process has it open: the run is running."""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """The connection of the only writer. Makes the file. Raises LedgerError."""
    try:
        new = not path.exists() or path.stat().st_size == 0
        connection = sqlite3.connect(path, timeout=2, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        if new:
            # Several trajectories of a few hundred tokens to a page: half the bytes of smaller pages.
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
    """A connection for a look at a run that has ended. Raises LedgerError."""
    if not path.exists():
        raise LedgerError(f"{path} does not exist: expected the folder of a run")
    try:
        # SQLite cannot read in WAL mode without writing, unless it is told that nobody writes.
        archived = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
        uri = f"{path.absolute().as_uri()}?{'immutable=1' if archived else 'mode=rw'}"
        connection = sqlite3.connect(uri, uri=True, timeout=2, isolation_level=None)
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    except (sqlite3.Error, OSError) as error:
        raise explained(path, error) from error
    check_format(connection, path)
    return connection


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    try:
        row = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    except sqlite3.Error as error:
        raise explained(path, error) from error
    if row is None or row[0] != FORMAT:
        found = "none" if row is None else row[0]
        raise LedgerError(f"{path} has the format {found}, this version of Slipstream writes {FORMAT}")


def explained(path: Path, error: Exception) -> LedgerError:
    """What a failure of SQLite means to the user."""
    text = str(error)
    if "locked" in text:
        return LedgerBusy(
            f"{path}: {text}: another process is running this run, or looking at it: "
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
        advice = "what was acknowledged before is still in it"
    return LedgerError(f"{path}: {text}: {advice}")
