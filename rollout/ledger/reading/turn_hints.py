"""Reads the hints of judges out of a ledger: what would have made the answers of live users better."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.rollout.ledger.rows.stored_turns import FORGOTTEN, NUMBER_BITS, decode_verdict, entry_of
from slipstream.rollout.ledger.storage.database import (
    FAILURES,
    LEDGER,
    BrokenSeal,
    LedgerError,
    crc_of,
    explained,
    open_for_reading,
    unsealed,
)
from slipstream.rollout.ledger.storage.segments import FOLDER, Segments
from slipstream.rollout.ledger.storage.stamp import read_stamp
from slipstream.rollout.tokens.record import REF, CorruptRecord


@dataclass(frozen=True)
class StoredHint:
    """The hint of one verdict."""

    gateway: str
    """Name of the journal that has recorded the turn."""
    entry: int
    """Number of the turn's entry in it."""
    state: str
    """State of the turn."""
    score: float | None
    hint: str


def hints_of(folder: Path) -> Iterator[StoredHint]:
    """Yield the hints that the ledger in a run folder still holds: of each gateway, in the order of turns.

    A session that has ended needs its payload no more once no restart can undo the training of its turns: its
    hints go with it. Raises LedgerError.
    """
    path = folder / LEDGER
    connection = open_for_reading(path)
    try:
        segments = Segments(folder / FOLDER, read_stamp(connection, path).run)
        rows = connection.execute(
            "SELECT t.id, g.name, t.state, t.verdict, t.hint FROM turns t JOIN gateways g "
            "ON g.id = (-t.id >> ?) WHERE t.hint IS NOT NULL AND t.gone != ? ORDER BY -t.id",
            (NUMBER_BITS, FORGOTTEN),
        )
        for id_, gateway, state, verdict, ref in rows:
            if len(ref) == REF.size and segments.has(*REF.unpack(ref)):
                score = decode_verdict(unsealed(verdict, crc_of(id_, 1))).score
                hint = segments.read(*REF.unpack(ref)).decode(errors="replace")
                yield StoredHint(gateway, entry_of(id_), state, score, hint)
    except (BrokenSeal, CorruptRecord) as error:
        raise LedgerError(f"{path}: table turns: {error}") from error
    except FAILURES as error:
        raise explained(path, error) from error
    finally:
        connection.close()
