"""The ledger's events of live users, as the event loop records them.

    entry ──► append its payload ──► rows ──► number of the last entry, all in one transaction

So the ledger has an entry exactly if it says that it has: a gateway that sends it again is passed over.
"""

from collections.abc import Callable, Iterable

from slipstream.rollout.control.ends import Loss
from slipstream.rollout.control.live_door import TurnEnd
from slipstream.rollout.ledger.rows.stored_turns import Gateway, KnownTurn, Stage, TurnRow, VerdictRow
from slipstream.rollout.ledger.storage.database import crc_of, sealed
from slipstream.rollout.ledger.storage.segments import Buffer
from slipstream.rollout.ledger.writing.transaction import Forget, TurnEvents
from slipstream.rollout.tokens.record import REF, checksum, encode

NOTE_LENGTH = 2000
"""Largest number of characters of a note."""


class TurnLog:
    """Records events. Everything that is recorded before the event loop goes on is in one transaction."""

    def __init__(
        self,
        events: Callable[[], TurnEvents],
        append: Callable[[Buffer], tuple[int, int]],
        gateways: Iterable[Gateway],
    ) -> None:
        self._events = events
        self._append = append
        self._gateways = {gateway.name: gateway.id for gateway in gateways}

    def gateway(self, name: str) -> int:
        """Return the number of a gateway: a new one for a name that was never heard."""
        return self._gateways.setdefault(name, len(self._gateways) + 1)

    def taken(self, gateway: str, number: int) -> None:
        """Record that all entries of a gateway up to ``number`` were recorded."""
        self._events().gateways[self.gateway(gateway)] = (gateway, number)

    def turn(
        self,
        turn: KnownTurn,
        chunk: Buffer,
        said: bytes,
        *,
        end: TurnEnd | None = None,
        loss: Loss | None = None,
        note: str = "",
    ) -> None:
        """Record a new turn with its tokens and the encoded messages of the request and the answer, and note
        where they are. ``end``: it is not trained.
        """
        turn.chunk, turn.said = self._stored(chunk), self._stored(said)
        events = self._events()
        events.sessions[turn.session] = False
        events.rows.append(
            TurnRow(
                turn.id,
                turn.session,
                turn.key,
                None if turn.parent is None else turn.parent.id,
                Stage.WAITING.value if end is None else end.value,
                None if loss is None else loss.value,
                turn.head.sampled,
                sealed(encode(turn.head), crc_of(turn.id)),
                turn.chunk,
                turn.said,
                note[:NOTE_LENGTH] or None,
            )
        )

    def followed(self, turn: KnownTurn, messages: bytes) -> None:
        """Record what came after a turn, which now waits for its verdict."""
        turn.next = self._stored(messages)
        self._events().next.append((turn.next, turn.id))

    def judged(
        self, turn: KnownTurn, verdict: VerdictRow, hint: str | None = None, scores: bytes = b""
    ) -> None:
        """Record the verdict on a turn, which is ready now. A later one takes the place of an earlier one.

        ``scores``: encoded ones of a teacher; empty: those of an earlier verdict stay.
        """
        turn.verdict = verdict
        hint_ref = None if hint is None else self._stored(hint.encode(errors="replace"))
        scores_ref = self._stored(scores) if scores else None
        if scores_ref is not None:
            turn.teacher = scores_ref
        row = sealed(encode(verdict), crc_of(turn.id, 1))
        self._events().verdicts.append((row, hint_ref, scores_ref, turn.id))

    def ended(
        self,
        id_: int,
        end: TurnEnd,
        loss: Loss | None = None,
        *,
        version: int | None = None,
        lag: int | None = None,
        note: str = "",
    ) -> None:
        """Record that a turn is not trained. ``version``, ``lag``: how old an expired one was, and when."""
        reason = None if loss is None else loss.value
        self._events().ended.append((end.value, reason, version, lag, note[:NOTE_LENGTH] or None, id_))

    def forget(self, session: int | None, key: int | None, entry: int) -> None:
        """Record that a session, a key or a session of a key is forgotten. Its turns end, unless they have
        ended, and no training of theirs is ever repeated. Their payload stays until ``may_erase``.

        ``session``: number that stands for its name alone. ``entry``: ``turn_id`` of the entry that asks
        for it.
        """
        events = self._events()
        events.forget.append(Forget(session, key, entry))
        events.may_erase = False  # it was said of what had been forgotten before

    def may_erase(self) -> None:
        """Overwrite the payload of all forgotten turns: nobody reads it now."""
        self._events().may_erase = True

    def session_ended(self, session: int) -> None:
        """Record that no further turn follows in a session."""
        self._events().sessions[session] = True

    def _stored(self, data: Buffer) -> bytes:
        segment, offset = self._append(data)
        return REF.pack(segment, offset, len(data), checksum(data))
