"""Reads the turns of live users with which a restart goes on, and checks them byte by byte."""

import json
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from slipstream.rollout.control.ends import Loss
from slipstream.rollout.control.live_door import TurnEnd
from slipstream.rollout.ledger.rows.holds import Holds
from slipstream.rollout.ledger.rows.stored_turns import (
    FORGOTTEN,
    KEPT,
    OPEN,
    PAYLOAD,
    Gateway,
    Payload,
    RecoveredTurns,
    StoredTurn,
    TurnHead,
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
    """Make turns ready again that were trained off the ``line``, but for those that are forgotten.

    Nothing is left of turns that were released, so that they cannot be trained again.
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
    rows: Iterable[tuple[int, int, int, int | None, str, int, bytes, bytes | None, bytes | None]] = (
        connection.execute(
            f"SELECT t.id, session, key, parent, state, gone, head, verdict, {', '.join(PAYLOAD)} "
            "FROM turns t JOIN sessions s ON s.id = t.session ORDER BY -t.id"
        )
    )
    for row in rows:
        found.turns.append(reader.read(row))
    _end_lost(connection, found.turns, reader.problems)
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
        self._lost: set[int] = set()
        self.problems: dict[str, list[int]] = {}

    def read(self, row: tuple[object, ...]) -> StoredTurn:
        id_, session, key, parent, state, gone, head, verdict, *refs = row
        assert isinstance(id_, int)
        assert isinstance(session, int)
        assert isinstance(key, int)
        assert isinstance(parent, int | None)
        assert isinstance(state, str)
        payload = Payload(*[ref if isinstance(ref, bytes) and gone == KEPT else None for ref in refs])
        for ref in payload:
            if ref is not None and len(ref) == REF.size and REF.unpack(ref)[0] in self._holds.ever:
                self._holds.need_all(session, ref)
        payload = Payload(*[None if ref is None or self._is_damaged(id_, ref) else ref for ref in payload])
        decoded = self._decoded(id_, head, decode_head, crc_of(id_))
        score = None if verdict is None else self._decoded(id_, verdict, decode_verdict, crc_of(id_, 1))
        # Whoever continues a turn that is lost is lost with it.
        is_lost = decoded is None or not decoded.is_whole or payload.chunk is None or parent in self._lost
        if is_lost:
            self._lost.add(id_)
        return StoredTurn(id_, session, key, parent, state, decoded or _NOTHING, payload, score, is_lost)

    def _is_damaged(self, id_: int, ref: bytes) -> bool:
        if len(ref) != REF.size:
            problem = f"{self._path}: table turns: {len(ref)} bytes are no reference"
        else:
            segment, offset, size, crc = REF.unpack(ref)
            if self._segments.has(segment, offset, size, crc):
                return False
            problem = f"{self._segments.path(segment)}: {self._segments.problem(segment, offset, size)}"
        self.problems.setdefault(problem, []).append(id_)
        return True

    def _decoded(self, id_: int, blob: object, decode: Callable[[bytes], T], start: int) -> T | None:
        try:
            assert isinstance(blob, bytes)
            return decode(unsealed(blob, start))
        except (BrokenSeal, CorruptRecord) as error:
            self.problems.setdefault(f"{self._path}: table turns: {error}", []).append(id_)
            return None


def _end_lost(
    connection: sqlite3.Connection, turns: list[StoredTurn], problems: dict[str, list[int]]
) -> None:
    """End the turns that cannot be trained or judged any more."""
    damaged = {id_ for ids in problems.values() for id_ in ids}
    for turn in turns:
        needs_said = turn.state in ("waiting", "unjudged")
        verdict = turn.verdict
        has_verdict = verdict is not None and not (verdict.has_teacher and turn.payload.teacher is None)
        cannot_go_on = (
            turn.is_lost
            or (needs_said and (turn.payload.said is None or turn.id in damaged))
            or (turn.state == "ready" and not has_verdict)
        )
        if turn.state in ("waiting", "unjudged", "ready") and cannot_go_on:
            turn.state = TurnEnd.FAILED.value
            connection.execute(
                f"UPDATE turns SET state = 'failed', loss = ?, note = ? WHERE id = ? AND {OPEN}",
                (Loss.FAILED.value, "its tokens or its messages are damaged, or those before them", turn.id),
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
            score = decode_verdict(unsealed(blob or b"", crc_of(id_, 1))).score
            if score is not None:
                scores.append((key, score))
    return scores
