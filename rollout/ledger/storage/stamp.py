"""The stamp of a ledger: how much its database has recorded, renewed by each transaction.

The rows that the stamp counts must be there, and SQLite's log must go on from there: ``write_ahead_log.py``.
"""

import sqlite3
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from slipstream.rollout.ledger.storage.database import RESTORE, LedgerError

_STAMP = struct.Struct("<16s9Q")
_CRC = struct.Struct("<I")
SIZE = _STAMP.size + _CRC.size


@dataclass(frozen=True)
class Stamp:
    """Numbers that only grow."""

    run: bytes
    """The run's UUID."""
    sequence: int = 0
    """Transactions committed."""
    base: int = 0
    """Transactions that the file itself must have before the log is applied to it."""
    begun: int = 0
    """Largest number of a version that was begun."""
    groups: int = 0
    """Groups admitted."""
    rows: int = 0
    """Number of the next row of ``samples``."""
    trainings: int = 0
    """Rows of ``trainings``."""
    batches: int = 0
    """Rows of ``batches``."""
    released: int = 0
    """Version up to which trained trajectories are needed no more."""
    turns: int = 0
    """Rows of ``turns``."""

    def encode(self) -> bytes:
        data = _STAMP.pack(
            self.run,
            self.sequence,
            self.base,
            self.begun,
            self.groups,
            self.rows,
            self.trainings,
            self.batches,
            self.released,
            self.turns,
        )
        return data + _CRC.pack(zlib.crc32(data))


def decode_stamp(data: bytes) -> Stamp | None:
    """Return the stamp; None if it is damaged."""
    if len(data) != SIZE or _CRC.unpack(data[-_CRC.size :])[0] != zlib.crc32(data[: -_CRC.size]):
        return None
    return Stamp(*_STAMP.unpack(data[: -_CRC.size]))


def stored_stamp(connection: sqlite3.Connection) -> Stamp | None:
    """Return the stamp in a database, unchecked; None if there is none that can be read."""
    row: tuple[bytes] | None = connection.execute("SELECT data FROM stamp").fetchone()
    return decode_stamp(row[0]) if row is not None else None


def read_stamp(connection: sqlite3.Connection, path: Path) -> Stamp:
    """Return the stamp of an open ledger. Raises LedgerError when it does not fit the rows."""
    stamp = stored_stamp(connection)
    if stamp is None:
        raise LedgerError(f"{path}: its stamp is damaged: {RESTORE}")
    run: tuple[str] | None = connection.execute("SELECT value FROM meta WHERE key = 'run'").fetchone()
    if run is None or run[0] != stamp.run.hex():
        raise LedgerError(f"{path} names two different runs: the file is damaged: {RESTORE}")
    for what, recorded, query in (
        ("groups", stamp.groups, "SELECT count(*) FROM groups"),
        ("the largest version", stamp.begun, "SELECT max(version) FROM versions"),
        ("trainings", stamp.trainings, "SELECT count(*) FROM trainings"),
        ("batches", stamp.batches, "SELECT count(*) FROM batches"),
        ("turns", stamp.turns, "SELECT count(*) FROM turns"),
    ):
        present: int = connection.execute(query).fetchone()[0] or 0
        if present != recorded:
            raise LedgerError(
                f"{path} has recorded {recorded} as {what}, but it has {present}: it mixes pages of "
                f"different times, because it or its log was damaged or restored without the other: {RESTORE}"
            )
    return stamp
