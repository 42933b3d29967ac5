"""The stamp of a ledger: how much its database has recorded, renewed by each transaction.

A damaged database may look sound: SQLite applies any write-ahead log of the right name, also one from another
time, and then mixes pages of two times. So the database says how far it is, once in the file itself and once
in the log, and the two must fit together:

    ledger.sqlite        complete up to transaction 700, at least
    ledger.sqlite-wal    goes on from a file that is complete up to transaction ``base``, and ends with 912

They fit if base <= 700 <= 912. The rows that the stamp counts must be there, too.
"""

import sqlite3
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.rollout.ledger.database import FAILURES, RESTORE, LedgerError, log_of, open_without_log

_STAMP = struct.Struct("<16s7Q")
_CRC = struct.Struct("<I")
SIZE = _STAMP.size + _CRC.size

PAGE = 2
"""Page of the database that holds the table of the stamp: the first table gets the first free page."""


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
        )
        return data + _CRC.pack(zlib.crc32(data))


def decode_stamp(data: bytes) -> Stamp | None:
    """Return the stamp; None if it is damaged."""
    if len(data) != SIZE or _CRC.unpack(data[-_CRC.size :])[0] != zlib.crc32(data[: -_CRC.size]):
        return None
    return Stamp(*_STAMP.unpack(data[: -_CRC.size]))


def read_stamp(connection: sqlite3.Connection, path: Path) -> Stamp:
    """Return the stamp of an open ledger. Raises LedgerError when it does not fit the rows."""
    row: tuple[bytes] | None = connection.execute("SELECT data FROM stamp").fetchone()
    stamp = decode_stamp(row[0]) if row is not None else None
    if stamp is None:
        raise LedgerError(f"{path}: its stamp is damaged: {RESTORE}")
    for what, recorded, query in (
        ("groups", stamp.groups, "SELECT count(*) FROM groups"),
        ("the largest version", stamp.begun, "SELECT max(version) FROM versions"),
        ("trainings", stamp.trainings, "SELECT count(*) FROM trainings"),
        ("batches", stamp.batches, "SELECT count(*) FROM batches"),
    ):
        present: int = connection.execute(query).fetchone()[0] or 0
        if present != recorded:
            raise LedgerError(
                f"{path} has recorded {recorded} as {what}, but it has {present}: it mixes pages of "
                f"different times, because it or its log was damaged or restored without the other: {RESTORE}"
            )
    return stamp


def check_log(path: Path) -> int:
    """Return the number of the last transaction in the write-ahead log beside a ledger; 0 if there is none.

    The transaction may be incomplete, or damaged. Call this before the ledger is opened: SQLite copies the
    log into the file when it closes it. Raises LedgerError when the log does not belong to the file.
    """
    log = log_of(path)
    stamps = list(_stamps(log))
    in_file = _stamp_in_file(path) if stamps else None
    if in_file is None:
        return 0  # SQLite finds other damage
    first, last = stamps[0], stamps[-1]
    if first.run != in_file.run:
        raise LedgerError(f"{log} belongs to another run than {path}: {RESTORE}")
    if not first.base <= in_file.sequence <= last.sequence:
        raise LedgerError(
            f"{log} is from another time than {path}: it goes on from transaction {first.base} and ends with "
            f"{last.sequence}, but the file is as of transaction {in_file.sequence}. One of them was "
            "restored from a copy without the other: restore both from the same copy, or start the run anew "
            "under another name"
        )
    return last.sequence


def _stamp_in_file(path: Path) -> Stamp | None:
    try:
        connection = open_without_log(path)
        try:
            row: tuple[bytes] | None = connection.execute("SELECT data FROM stamp").fetchone()
        finally:
            connection.close()
    except FAILURES:
        return None
    return decode_stamp(row[0]) if row is not None else None


# ---- the format of SQLite's write-ahead log: https://www.sqlite.org/fileformat2.html#walformat

_LOG_HEADER = struct.Struct(">8I")
_FRAME_HEADER = struct.Struct(">6I")
_LEAF_OF_TABLE = 0x0D


def _stamps(log: Path) -> Iterator[Stamp]:
    """Yield the stamps in a write-ahead log, in order, without those of an earlier use of the file."""
    try:
        file = log.open("rb")
    except OSError:
        return
    with file:
        header = file.read(_LOG_HEADER.size)
        if len(header) < _LOG_HEADER.size:
            return
        _, _, page_size, _, *salts, _, _ = _LOG_HEADER.unpack(header)
        while len(frame := file.read(_FRAME_HEADER.size)) == _FRAME_HEADER.size:
            number, _, *frame_salts, _, _ = _FRAME_HEADER.unpack(frame)
            if frame_salts != salts:
                return
            if number != PAGE:
                file.seek(page_size, 1)
            elif (stamp := _stamp_on_page(file.read(page_size))) is not None:
                yield stamp


def _stamp_on_page(page: bytes) -> Stamp | None:
    """Return the stamp on a page of the B-tree that holds one row, with a BLOB at the row's end."""
    if len(page) < 10 or page[0] != _LEAF_OF_TABLE or int.from_bytes(page[3:5], "big") != 1:
        return None
    start = int.from_bytes(page[8:10], "big")
    end = start + 2 + page[start] if start < len(page) else 0  # one byte each for the row's length and its id
    return decode_stamp(page[max(end - SIZE, 0) : end])
