"""SQLite's write-ahead log, looked at before SQLite applies it.

A damaged database may look sound: SQLite applies any log of the right name, also one from another time, and
then mixes pages of two times. So the database says how far it is, once in the file itself and once in the
log, and the two must fit together:

    ledger.sqlite        complete up to transaction 700, at least
    ledger.sqlite-wal    goes on from a file that is complete up to transaction ``base``, and ends with 912

They fit if base <= 700 <= 912. And SQLite silently stops at the first damaged frame of a log, which may not
be the end of it.
"""

import struct
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.rollout.ledger.storage.database import (
    FAILURES,
    RESTORE,
    LedgerError,
    log_of,
    open_without_log,
)
from slipstream.rollout.ledger.storage.stamp import SIZE, Stamp, decode_stamp, stored_stamp

PAGE = 2
"""Page of the database that holds the table of the stamp: the first table gets the first free page."""

# The format: https://www.sqlite.org/fileformat2.html#walformat
_HEADER = struct.Struct(">8I")
_FRAME_HEADER = struct.Struct(">6I")
_MAGIC = (0x377F0682, 0x377F0683)
_LEAF_OF_TABLE = 0x0D


@dataclass
class Log:
    """The frames of a log that were written since it was last begun anew."""

    frames: int = 0
    """Number of the last of them, from 1. SQLite uses less when the log is damaged or its end is missing."""
    stamps: list[Stamp] = field(default_factory=list[Stamp])

    @property
    def last(self) -> int:
        """Number of the last transaction in the log, complete or not; 0 if there is none."""
        return self.stamps[-1].sequence if self.stamps else 0


def checked_log(path: Path) -> Log:
    """Return the log beside a ledger. Raises LedgerError when it does not belong to the ledger.

    Call this before the ledger is opened: SQLite copies the log into the file when it closes it.
    """
    log = _read(log_of(path))
    in_file = _stamp_in_file(path) if log.stamps else None
    if in_file is None:
        return log  # SQLite finds other damage
    first = log.stamps[0]
    if first.run != in_file.run:
        raise LedgerError(f"{log_of(path)} belongs to another run than {path}: {RESTORE}")
    if not first.base <= in_file.sequence <= log.last:
        raise LedgerError(
            f"{log_of(path)} is from another time than {path}: it goes on from transaction {first.base} and "
            f"ends with {log.last}, but the file is as of transaction {in_file.sequence}. One of them was "
            "restored from a copy without the other: restore both from the same copy, or start the run anew "
            "under another name"
        )
    return log


def _stamp_in_file(path: Path) -> Stamp | None:
    try:
        connection = open_without_log(path)
        try:
            return stored_stamp(connection)
        finally:
            connection.close()
    except FAILURES:
        return None


def _read(path: Path) -> Log:
    log = Log()
    try:
        file = path.open("rb")
    except OSError:
        return log  # SQLite says what is wrong
    with file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return log
        magic, _, page_size, _, *salts, _, _ = _HEADER.unpack(header)
        is_sound = magic in _MAGIC
        number = 0
        while len(frame := file.read(_FRAME_HEADER.size)) == _FRAME_HEADER.size:
            number += 1
            page, _, *frame_salts, _, _ = _FRAME_HEADER.unpack(frame)
            content = file.read(page_size if is_sound else -1)
            if is_sound and frame_salts != salts:
                continue  # of an earlier use of the file, or damaged
            log.frames = number
            if page == PAGE and (stamp := _stamp_on_page(content)) is not None:
                log.stamps.append(stamp)
    return log


def _stamp_on_page(page: bytes) -> Stamp | None:
    """Return the stamp on a page of the B-tree that holds one row, with a BLOB at the row's end."""
    if len(page) < 10 or page[0] != _LEAF_OF_TABLE or int.from_bytes(page[3:5], "big") != 1:
        return None
    start = int.from_bytes(page[8:10], "big")
    end = start + 2 + page[start] if start < len(page) else 0  # one byte each for the row's length and its id
    return decode_stamp(page[max(end - SIZE, 0) : end])
