"""A turn of a live user in memory, and the branch that it ends. Plain data."""

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from slipstream.rollout.ledger.rows.stored_turns import Payload, StoredTurn, TurnHead, VerdictRow
from slipstream.rollout.system.frames import UNREADABLE
from slipstream.rollout.tokens.record import CorruptRecord


class Said(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What is stored of a request and its answer, for the judge."""

    session: str
    key: str
    kept: int
    """Messages of the conversation before that the request repeats: ``Turn.kept``."""
    messages: bytes
    """JSON list."""
    answer: bytes
    """JSON."""


_SAID = msgspec.msgpack.Decoder(Said)


def decode_said(data: bytes) -> Said:
    """Return what was said. Raises CorruptRecord."""
    try:
        return _SAID.decode(data)
    except UNREADABLE as error:
        raise CorruptRecord(f"not the messages of a turn: {error}") from error


@dataclass(slots=True, eq=False)
class KnownTurn:
    """A turn of a session that is not over. Where its tokens are, but not the tokens."""

    id: int
    session: int
    key: int
    parent: "KnownTurn | None"
    head: TurnHead
    payload: Payload
    verdict: VerdictRow | None = None
    """None: there is none yet."""
    has_followed: bool = False
    """True if something has come after it, or its session has ended."""
    followed_s: float = 0.0
    """When something followed, or the run was started since: seconds since the epoch."""
    is_lost: bool = False
    """Its tokens are not there: nothing that continues it can be trained."""
    put_off: int = 0
    """How often a judge had no verdict on it."""

    @property
    def continues(self) -> "KnownTurn | None":
        """The turn before, if the prompt of this one repeats all of its tokens."""
        before = self.parent
        return before if before is not None and before.head.length == self.head.shared else None

    @property
    def score(self) -> float | None:
        """The score of its verdict; None: there is no verdict yet, or only a teacher's scores."""
        return None if self.verdict is None else self.verdict.score

    @property
    def own_length(self) -> int:
        """Number of tokens of its chunk."""
        return self.head.context + self.head.sampled

    @classmethod
    def stored(cls, turn: StoredTurn, parent: "KnownTurn | None") -> "KnownTurn":
        """Return a turn from before a restart."""
        return cls(
            turn.id,
            turn.session,
            turn.key,
            parent,
            turn.head,
            turn.payload,
            verdict=turn.verdict,
            has_followed=turn.payload.next is not None,
            is_lost=turn.is_lost,
        )


class BranchPart(NamedTuple):
    """The first tokens of a turn's chunk."""

    turn: KnownTurn
    kept: int


def branch_of(turn: KnownTurn) -> list[BranchPart]:
    """Return what the tokens up to the end of a turn consist of, the oldest first."""
    parts = [BranchPart(turn, turn.own_length)]
    limit, before = turn.head.shared, turn.parent
    while before is not None and limit > 0:
        kept = min(before.own_length, limit - before.head.shared)
        if kept > 0:
            parts.append(BranchPart(before, kept))
        limit, before = min(limit, before.head.shared), before.parent
    return parts[::-1]


@dataclass(slots=True)
class Session:
    """A session that is not over."""

    turns: dict[int, KnownTurn] = field(default_factory=dict[int, KnownTurn])
    has_ended: bool = False
    """No further turn follows."""
    is_forgotten: bool = False
    """It has ended by being forgotten, and the ledger is to hear of its end when nothing of it is read."""

    def goes_on(self) -> None:
        """Note that a turn has come."""
        self.has_ended = self.is_forgotten = False

    def forget(self) -> None:
        """Note that the session was forgotten."""
        self.has_ended = self.is_forgotten = True
