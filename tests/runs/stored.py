"""Reads the episodes that a run has stored, as a kill at this moment would leave them."""

import shutil
import sqlite3
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.rollout.ledger.rows.samples import SAMPLES, Fold, StoredRow
from slipstream.rollout.ledger.storage.database import LEDGER, LedgerError, open_for_reading
from slipstream.rollout.ledger.storage.segments import FOLDER, Segments
from slipstream.rollout.tokens.record import (
    REF,
    decode_chunks,
    decode_header,
    decode_piece,
    decode_trajectory,
)
from slipstream.rollout.tokens.trajectory import Finish, Trajectory


@dataclass
class Answer:
    """A completion of an unfinished episode."""

    tokens: tuple[int, ...] = ()
    finish: Finish = Finish.PARTIAL
    """PARTIAL if only its beginning is stored."""


@dataclass
class Stored:
    """Episodes are named by their keys: group id * 2^16 + sample."""

    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    """By episode and call: the completions of unfinished episodes, whole or in part."""
    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    """By episode: the finished ones."""

    @property
    def partial(self) -> set[tuple[int, int]]:
        """The completions of which only the beginning is stored."""
        return {key for key, answer in self.answers.items() if answer.finish is Finish.PARTIAL}


def stored(folder: Path) -> Stored:
    """Read the episodes of groups that count from a run folder; nothing while they cannot be read."""
    with tempfile.TemporaryDirectory() as scratch, suppress(LedgerError, sqlite3.Error, OSError):
        for file in folder.glob(f"{LEDGER}*"):
            shutil.copy(file, scratch)
        # Behind the database: a segment is on disk before the rows that point into it.
        shutil.copytree(folder / FOLDER, Path(scratch) / FOLDER)
        return _read(Path(scratch))
    return Stored()


def _read(folder: Path) -> Stored:
    ledger = open_for_reading(folder / LEDGER)
    try:
        (run,) = ledger.execute("SELECT value FROM meta WHERE key = 'run'").fetchone()
        rows: list[StoredRow] = ledger.execute(
            "SELECT samples.* FROM samples JOIN groups ON groups.id = key / ? "
            "WHERE samples.id >= since ORDER BY samples.id",
            (SAMPLES,),
        ).fetchall()
    finally:
        ledger.close()
    fold = Fold()
    for row in rows:
        fold.add(row)
    if fold.wrong:
        raise LedgerError(f"{fold.wrong}")
    segments, result = Segments(folder / FOLDER, bytes.fromhex(run)), Stored()
    for key, sample in fold.samples.items():
        if sample.header is not None:
            data = b"".join(segments.read(*ref) for ref in REF.iter_unpack(sample.refs))
            result.trajectories[key] = decode_trajectory(data, decode_header(sample.header))
        for ref, header in sample.pieces:
            piece = decode_piece(header)
            answer = result.answers.setdefault((key, piece.call), Answer())
            for chunk in decode_chunks(segments.read(*REF.unpack(ref))):
                answer.tokens += tuple(chunk.tokens.tolist())
            answer.finish = piece.finish
    return result
