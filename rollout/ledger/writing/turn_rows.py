"""Rows of the turns of live users, as the writer thread writes them.

A session needs the segments of its payload until it has ended, all of its turns have ended, and no restart
can undo the training of one: a turn may be the context of any later turn of its session. Then it is *closed*,
and the segments may go. What is forgotten is written over, also in sessions that are closed.
"""

import sqlite3
from collections.abc import Collection, Iterable
from typing import Any

from slipstream.rollout.ledger.rows.holds import Holds
from slipstream.rollout.ledger.rows.stored_turns import (
    FORGOTTEN,
    KEPT,
    NOT_NEEDED,
    OPEN,
    PAYLOAD,
    TurnRow,
    gateway_of,
    session_of,
    turn_id,
)
from slipstream.rollout.ledger.storage.segments import Part, Segments
from slipstream.rollout.ledger.writing.moves import Moved, Place, copied
from slipstream.rollout.ledger.writing.transaction import Forget, Training, TurnEvents
from slipstream.rollout.tokens.record import REF


class TurnRows:
    """Writes what was heard of live users, within a transaction of the caller."""

    def __init__(
        self, connection: sqlite3.Connection, segments: Segments, holds: Holds, moved: Moved, released: int
    ) -> None:
        """``released``: version up to which no restart can undo a training."""
        self._connection = connection
        self._segments = segments
        self._holds = holds
        self._moved = moved
        self._released = released
        self._must_erase = True
        """True if payload of forgotten turns may be left, as after a restart."""

    def write(self, events: TurnEvents) -> int:
        """Write all events but trainings. Return the number of new turns.

        ``close_over`` is due when trainings are written.
        """
        if not events:
            return 0
        many = self._connection.executemany
        many(
            "INSERT INTO gateways (id, name, durable) VALUES (?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET durable = excluded.durable",
            [(id_, name, number) for id_, (name, number) in events.gateways.items()],
        )
        many(
            "INSERT INTO sessions (id, ended) VALUES (?, ?) "
            "ON CONFLICT (id) DO UPDATE SET ended = excluded.ended",
            [(id_, int(ended)) for id_, ended in events.sessions.items()],
        )
        for session in events.sessions:
            self._holds.begin(session)
        for row in events.rows:
            self._need(row.session, row.chunk)
            self._need(row.session, row.said)
        many(
            f"INSERT INTO turns ({', '.join(TurnRow._fields)}) "
            f"VALUES ({', '.join('?' * len(TurnRow._fields))})",
            events.rows,
        )
        for ref, id_ in events.next:
            self._need(self._session_of(id_), ref)
        many(f"UPDATE turns SET state = 'unjudged', next = ? WHERE id = ? AND {OPEN}", events.next)
        for _, *refs, id_ in events.verdicts:
            for ref in refs:
                self._need(self._session_of(id_), ref)
        many(
            "UPDATE turns SET state = 'ready', verdict = ?, hint = ?, teacher = ifnull(?, teacher) "
            f"WHERE id = ? AND {OPEN}",
            events.verdicts,
        )
        many(
            f"UPDATE turns SET state = ?, loss = ?, version = ?, lag = ?, note = ? WHERE id = ? AND {OPEN}",
            events.ended,
        )
        if events.forget and self._must_erase:
            self.tidy()  # before, because a training step may still read what is forgotten now
        for forget in events.forget:
            self._forget(forget)
        self._must_erase = self._must_erase or events.may_erase
        return len(events.rows)

    def close_over(self, events: TurnEvents) -> None:
        """Close the sessions that were ended by the events, or whose last turn was."""
        self.close({*events.sessions, *self._sessions_of(id_ for *_, id_ in events.ended)})

    def _forget(self, forget: Forget) -> None:
        """End the turns that are to be forgotten, and mark their payload."""
        where, numbers = ["1"], list[int]()
        if forget.session is not None:
            keys = [forget.key]
            if forget.key is None:
                keys = [key for (key,) in self._connection.execute("SELECT DISTINCT key FROM turns")]
            numbers = [session_of(key, forget.session) for key in keys if key is not None]
            where = [f"session IN ({', '.join('?' * len(numbers))})"]
        elif forget.key is not None:
            where, numbers = ["key = ?"], [forget.key]
        next_gateway = turn_id(gateway_of(forget.entry) + 1, 0)
        where.append("NOT (id < ? AND id > ?)")
        values = (*numbers, forget.entry, next_gateway)
        condition = " AND ".join(where)
        self._connection.execute(
            f"UPDATE turns SET state = 'forgotten', loss = NULL WHERE {OPEN} AND {condition}", values
        )
        self._connection.execute(f"UPDATE turns SET gone = {FORGOTTEN} WHERE {condition}", values)

    def trained(self, version: int, trainings: Iterable[Training]) -> None:
        """Write which turns a version was trained on. Other trainings are passed over."""
        self._connection.executemany(
            "UPDATE turns SET state = 'trained', step = ? WHERE id = ?",
            [(version, training.group_id) for training in trainings if training.group_id < 0],
        )

    def released(self, version: int, turns: Iterable[int]) -> None:
        """Note that no restart can undo the training of ``turns`` any more."""
        self._released = max(self._released, version)
        self.close(self._sessions_of(turns))

    def close(self, sessions: Collection[int]) -> None:
        """Give up the payload of those of the sessions of which nothing is needed any more."""
        for session in sessions:
            row = self._connection.execute(
                "SELECT 1 FROM sessions WHERE id = ? AND ended = 1 AND NOT EXISTS (SELECT 1 FROM turns "
                f"WHERE session = ? AND ({OPEN} OR state = 'trained' AND step > ?))",
                (session, session, self._released),
            ).fetchone()
            if row is None:
                continue
            self._connection.execute(
                f"UPDATE turns SET gone = {NOT_NEEDED} WHERE session = ? AND gone = {KEPT}", (session,)
            )
            self._connection.execute("DELETE FROM sessions WHERE id = ?", (session,))
            self._holds.end(session)
            self._moved.forget(session)

    # ---- payload

    @property
    def is_tidy(self) -> bool:
        """True if ``tidy`` has nothing to do."""
        return not self._must_erase

    def tidy(self) -> None:
        """Write over the payload of the turns that are forgotten, and forget where it was."""
        self._must_erase = False
        self.close([id_ for (id_,) in self._connection.execute("SELECT id FROM sessions WHERE ended = 1")])
        rows: list[tuple[Any, ...]] = self._connection.execute(
            f"SELECT id, {', '.join(PAYLOAD)} FROM turns WHERE gone = {FORGOTTEN} AND said IS NOT NULL"
        ).fetchall()
        for _, *refs in rows:
            for segment, offset, size, _ in REF.iter_unpack(b"".join(ref for ref in refs if ref)):
                self._segments.erase(segment, offset, size)
        nothing = ", ".join(f"{column} = NULL" for column in PAYLOAD)
        self._connection.executemany(
            f"UPDATE turns SET {nothing}, note = NULL WHERE id = ?", [(id_,) for id_, *_ in rows]
        )

    def move(
        self, sessions: Collection[int], leaving: Collection[int], part: Part
    ) -> dict[int, dict[Place, Place]]:
        """Copy the payload of sessions in the ``leaving`` segments into ``part``, which is not written yet.

        Return old and new places, by session. The rows are changed already.
        """
        places: dict[int, dict[Place, Place]] = {}
        for session in sessions:
            moved = places.setdefault(session, {})
            rows = self._connection.execute(
                f"SELECT id, {', '.join(PAYLOAD)} FROM turns WHERE session = ? AND gone = {KEPT}", (session,)
            ).fetchall()
            for id_, *refs in rows:
                new = [
                    b"".join(copied(ref, self._segments, leaving, part, moved)) if ref else ref
                    for ref in refs
                ]
                if new != refs:
                    self._connection.execute(
                        f"UPDATE turns SET {', '.join(f'{column} = ?' for column in PAYLOAD)} WHERE id = ?",
                        (*new, id_),
                    )
        return places

    def _need(self, session: int | None, refs: bytes | None) -> None:
        if session is not None and refs and session in self._holds.segments:
            self._holds.need_all(session, refs)

    def _session_of(self, turn: int) -> int | None:
        row = self._connection.execute("SELECT session FROM turns WHERE id = ?", (turn,)).fetchone()
        return None if row is None else row[0]

    def _sessions_of(self, turns: Iterable[int]) -> set[int]:
        return {session for turn in turns if (session := self._session_of(turn)) is not None}
