"""Reads the turns of live users with which a restart goes on, and checks them byte by byte."""

import json
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from slipstream.rollout.control.ends import Loss
from slipstream.rollout.ledger.rows.holds import Holds
from slipstream.rollout.ledger.rows.stored_turns import (
    FORGOTTEN,
    KEPT,
    OPEN,
    Gateway,
    KnownTurn,
    RecoveredTurns,
    Stage,
    TurnHead,
    TurnRow,
    VerdictRow,
    decode_head,
    decode_verdict,
)
from slipstream.rollout.ledger.storage.database import BrokenSeal, crc_of, few, unsealed
from slipstream.rollout.ledger.storage.segments import Segments
from slipstream.rollout.tokens.record import REF, CorruptRecord
from slipstream.rollout.tokens.trajectory import Finish

T = TypeVar("T", TurnHead, VerdictRow)

HISTORY = 50_000
"""Trained turns whose scores are read again for the running baseline. Older ones have no weight in it."""


_NOTHING = TurnHead(0, 0, (), Finish.STOP, 0.0)


def undo_turn_trainings(connection: sqlite3.Connection, line: list[int], released: int) -> None:
    """Undo the trainings of turns that are not on the ``line``: the turns are ready again.

    A turn that a user has removed is forgotten instead. A turn whose payload was released has failed: nothing
    is left of it, so it cannot be trained again.
    """
    undone = "state = 'trained' AND step NOT IN (SELECT value FROM json_each(:line))"
    values = {"line": json.dumps(line), "released": released}
    connection.execute(
        f"UPDATE turns SET state = 'forgotten', step = NULL WHERE {undone} AND gone = {FORGOTTEN}", values
    )
    connection.execute(
        "UPDATE turns SET state = 'failed', loss = 'failed', step = NULL, "
        "note = 'its payload was released before its training was lost' "
        f"WHERE {undone} AND (step <= :released OR gone != {KEPT})",
        values,
    )
    connection.execute(f"UPDATE turns SET state = 'ready', step = NULL WHERE {undone}", values)


def trained_turns(connection: sqlite3.Connection, released: int) -> Iterable[tuple[int, list[int]]]:
    """Yield the versions whose training of turns a restart may undo, with the turns, in ascending order."""
    rows: Iterable[tuple[int, int]] = connection.execute(
        "SELECT step, id FROM turns WHERE state = 'trained' AND step > ? ORDER BY step", (released,)
    )
    for step, group in groupby(rows, key=lambda row: row[0]):
        yield step, [id_ for _, id_ in group]


def read_turns(
    connection: sqlite3.Connection, path: Path, segments: Segments, holds: Holds, notes: list[str]
) -> RecoveredTurns:
    """Read everything that the run may go on with. What is damaged ends as failed, and is noted."""
    found = RecoveredTurns()
    found.gateways = [
        Gateway(*row) for row in connection.execute("SELECT id, name, durable FROM gateways ORDER BY id")
    ]
    sessions: list[tuple[int, int]] = connection.execute("SELECT id, ended FROM sessions").fetchall()
    found.ended_sessions = {session for session, ended in sessions if ended}
    for session, _ in sessions:
        holds.begin(session)
    reader = _Reader(path, segments, holds)
    lost: list[int] = []
    columns = ", ".join(f"t.{column}" for column in TurnRow._fields)
    for values in connection.execute(
        f"SELECT {columns} FROM turns t JOIN sessions s ON s.id = t.session ORDER BY -t.id"
    ):
        row = TurnRow(*values)
        turn = reader.read(row)
        found.turns.append(turn)
        if row.state not in set(Stage):
            continue
        if _cannot_go_on(turn, Stage(row.state), is_damaged=reader.is_damaged(turn.id)):
            lost.append(turn.id)
        else:
            found.open.add(turn.id)
    _end_lost(connection, lost)
    for problem, ids in reader.problems.items():
        notes.append(f"{problem}: {len(ids)} turns of live users are lost: {few(ids)}")
    found.counts = dict(connection.execute("SELECT state, count(*) FROM turns GROUP BY state").fetchall())
    found.trained = _trained_scores(connection)
    return found


class _Reader:
    def __init__(self, path: Path, segments: Segments, holds: Holds) -> None:
        self._path = path
        self._segments = segments
        self._holds = holds
        self._turns: dict[int, KnownTurn] = {}
        self._damaged: set[int] = set()
        self.problems: dict[str, list[int]] = {}

    def read(self, row: TurnRow) -> KnownTurn:
        """Return the turn of a row, without what is damaged. The turns before it were read before."""
        refs = [ref if isinstance(ref, bytes) and row.gone == KEPT else None for ref in row.refs]
        for ref in refs:
            if ref is not None and len(ref) == REF.size and REF.unpack(ref)[0] in self._holds.ever:
                self._holds.need_all(row.session, ref)
        chunk, said, following, _, teacher = [
            None if ref is None or self._is_unreadable(row.id, ref) else ref for ref in refs
        ]
        head = self._decoded(row.id, row.head, decode_head, crc_of(row.id))
        verdict = None
        if row.verdict is not None:
            verdict = self._decoded(row.id, row.verdict, decode_verdict, crc_of(row.id, 1))
        parent = None if row.parent is None else self._turns.get(row.parent)
        is_lost = parent is not None and parent.is_lost  # as all that continue it
        turn = self._turns[row.id] = KnownTurn(
            row.id,
            row.session,
            row.key,
            parent,
            head or _NOTHING,
            chunk,
            said,
            following,
            teacher,
            verdict,
            is_lost=is_lost or chunk is None or head is None or not head.is_whole,
            end=None if row.state in set(Stage) else row.state,
        )
        return turn

    def is_damaged(self, id_: int) -> bool:
        """True if anything that is stored of a turn is damaged."""
        return id_ in self._damaged

    def _note(self, problem: str, id_: int) -> None:
        self.problems.setdefault(problem, []).append(id_)
        self._damaged.add(id_)

    def _is_unreadable(self, id_: int, ref: bytes) -> bool:
        if len(ref) != REF.size:
            problem = f"{self._path}: table turns: {len(ref)} bytes are no reference"
        else:
            segment, offset, size, crc = REF.unpack(ref)
            if self._segments.has(segment, offset, size, crc):
                return False
            problem = f"{self._segments.path(segment)}: {self._segments.problem(segment, offset, size)}"
        self._note(problem, id_)
        return True

    def _decoded(self, id_: int, blob: object, decode: Callable[[bytes], T], start: int) -> T | None:
        try:
            assert isinstance(blob, bytes)
            return decode(unsealed(blob, start))
        except (BrokenSeal, CorruptRecord) as error:
            self._note(f"{self._path}: table turns: {error}", id_)
            return None


def _cannot_go_on(turn: KnownTurn, stage: Stage, *, is_damaged: bool) -> bool:
    """True if a turn cannot be trained or judged any more."""
    if turn.is_lost:
        return True
    if stage is not Stage.READY:
        return turn.said is None or is_damaged
    verdict = turn.verdict
    return verdict is None or (verdict.has_teacher and turn.teacher is None)


def _end_lost(connection: sqlite3.Connection, ids: list[int]) -> None:
    note = "its tokens or its messages are damaged, or those before them"
    connection.executemany(
        f"UPDATE turns SET state = 'failed', loss = ?, note = ? WHERE id = ? AND {OPEN}",
        [(Loss.FAILED.value, note, id_) for id_ in ids],
    )


def _trained_scores(connection: sqlite3.Connection) -> list[tuple[int, float]]:
    """Return key and score of the turns trained last, in the order of their training. Damaged scores are left
    out, whose sessions the run does not need.
    """
    rows: list[tuple[int, int, bytes | None]] = connection.execute(
        "SELECT id, key, verdict FROM turns WHERE state = 'trained' ORDER BY step DESC, id LIMIT ?",
        (HISTORY,),
    ).fetchall()
    scores: list[tuple[int, float]] = []
    for id_, key, blob in reversed(rows):
        with suppress(BrokenSeal, CorruptRecord):
            verdict = decode_verdict(unsealed(blob or b"", crc_of(id_, 1)))
            if verdict.score is not None and verdict.group is None:
                scores.append((key, verdict.score))
    return scores
