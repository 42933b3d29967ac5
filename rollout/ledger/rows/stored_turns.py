"""Turns of live users as the ledger names and stores them. Plain data.

    gateways   number of the last journal entry of each gateway that the ledger holds
    turns      one row per turn: its state, its head, where its payload stands
    sessions   the sessions of which anything may still be needed

Nothing that a user has said is in the database: names of sessions and keys are digests there, and what was
said is payload in segments. So a session can be forgotten by writing over its payload.
"""

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec

from slipstream.rollout.tokens.record import decoded
from slipstream.rollout.tokens.trajectory import Finish

NUMBER_BITS = 40
"""Entries of one journal: 2^40."""


class Stage(StrEnum):
    """States of a turn that has not ended. A turn in training is still `ready`, as a group is."""

    WAITING = "waiting"
    """Nothing has come after the turn yet."""
    UNJUDGED = "unjudged"
    """The turn waits for its verdict."""
    READY = "ready"


OPEN = "state IN ('waiting', 'unjudged', 'ready')"
"""SQL: a turn has not ended."""

PAYLOAD = ("chunk", "said", "next", "hint", "teacher")
"""Columns of references to payload."""

JUDGE, CLIENT = range(2)
"""Who has given a score."""


def turn_id(gateway: int, number: int) -> int:
    """Return the number of a turn in the run, given that of its entry in the journal of a gateway.

    It is below 0, where numbers of groups are not: batches, trainings and failed steps name both.
    """
    return -(gateway << NUMBER_BITS | number)


def gateway_of(turn: int) -> int:
    """Return the number of the gateway that has recorded a turn."""
    return -turn >> NUMBER_BITS


def entry_of(turn: int) -> int:
    """Return the number of the entry of a turn in its gateway's journal."""
    return -turn & (1 << NUMBER_BITS) - 1


KEPT, NOT_NEEDED, FORGOTTEN = range(3)
"""State of a turn's payload."""


def named(name: str) -> int:
    """Return the number that stands for a name: below 0, so never that of a group."""
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
    return -1 - (int.from_bytes(digest, "little") >> 1)


def session_of(key: int, name: int) -> int:
    """Return the number of a session, given those of its key and of its name.

    Sessions of two keys are never the same.
    """
    return named(f"{key}/{name}")


class TurnHead(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Everything about a turn that never changes, but its payload."""

    shared: int
    """Tokens that its prompt has in common with its parent's branch, from the beginning."""
    context: int
    """Further tokens of its prompt: the context of its chunk."""
    spans: tuple[tuple[int, int], ...]
    """(version, tokens) of the sampled tokens of its chunk."""
    finish: Finish
    ended_s: float
    """Seconds since the epoch at which the answer was complete."""
    is_whole: bool = True
    """True if all of its tokens, and those before it, are there and sound. Otherwise nothing that continues
    it can be trained."""
    is_rewarded: bool = False
    """True if its client rewards it: no judge is asked."""

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(tokens for _, tokens in self.spans)

    @property
    def length(self) -> int:
        """Number of tokens of the branch up to the end of this turn."""
        return self.shared + self.context + self.sampled

    @property
    def versions(self) -> frozenset[int]:
        """Versions of the sampled tokens."""
        return frozenset(version for version, tokens in self.spans if tokens)


class VerdictRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The verdict on a turn: a score, a teacher's scores of its tokens, or both."""

    score: float | None
    source: int
    has_teacher: bool = False
    """A teacher's scores belong to it: without them the turn cannot be trained."""
    parts: tuple[tuple[str, float], ...] = ()
    """Name and value of each reward of a client that is in the score."""
    group: tuple[float, float, int] | None = None
    """Mean, standard deviation and number of the rewards that the score is compared with; None: it is
    compared with the running mean."""


_HEAD = msgspec.msgpack.Decoder(TurnHead)
_VERDICT = msgspec.msgpack.Decoder(VerdictRow)


def decode_head(data: bytes) -> TurnHead:
    """Return the head of a turn. Raises CorruptRecord."""
    return decoded(_HEAD, data, "the head of a turn")


def decode_verdict(data: bytes) -> VerdictRow:
    """Return a verdict. Raises CorruptRecord."""
    return decoded(_VERDICT, data, "a verdict")


class TurnRow(NamedTuple):
    """A row of the table ``turns``, described in ``database``. A new turn does not have all of it."""

    id: int
    session: int
    key: int
    parent: int | None
    state: str
    loss: str | None
    sampled: int
    head: bytes
    """A sealed ``TurnHead``."""
    chunk: bytes | None
    said: bytes | None
    note: str | None = None
    gone: int = KEPT
    step: int | None = None
    version: int | None = None
    lag: int | None = None
    verdict: bytes | None = None
    """A sealed ``VerdictRow``."""
    next: bytes | None = None
    hint: bytes | None = None
    teacher: bytes | None = None

    @property
    def refs(self) -> tuple[bytes | None, ...]:
        """References to the turn's payload, in the order of the columns ``PAYLOAD``."""
        return self.chunk, self.said, self.next, self.hint, self.teacher


@dataclass(slots=True, eq=False)
class KnownTurn:
    """A turn of a session that is not over. Where its tokens and messages are, but not the tokens.

    References are packed ``record.REF``; None: there is nothing, or it is damaged.
    """

    id: int
    session: int
    key: int
    parent: "KnownTurn | None"
    """The turn that it continues, if that is known, too."""
    head: TurnHead
    chunk: bytes | None = None
    """One chunk of ``rollout.tokens.record``."""
    said: bytes | None = None
    """The messages of the request and of the answer."""
    next: bytes | None = None
    """The messages that came after the turn. Empty ones if its session has ended."""
    teacher: bytes | None = None
    """A teacher's scores of its sampled tokens: ``record.encode_scores``."""
    verdict: VerdictRow | None = None
    """None: there is none yet."""
    is_lost: bool = False
    """Its tokens are damaged or were given up: neither the turn nor one that continues it can be trained."""
    followed_s: float = 0.0
    """When something followed, or the run was started since: seconds since the epoch."""
    end: str | None = None
    """How it had ended when the run was started; None: it had not."""
    put_off: int = 0
    """Number of times that a judge was asked about the turn and gave no verdict."""

    @property
    def continues(self) -> "KnownTurn | None":
        """The turn before, if the prompt of this one repeats all of its tokens."""
        before = self.parent
        return before if before is not None and before.head.length == self.head.shared else None

    @property
    def has_followed(self) -> bool:
        """True if something has come after it, or its session has ended."""
        return self.next is not None

    @property
    def has_payload(self) -> bool:
        """True if anything that is stored of it can be read."""
        return any(ref is not None for ref in (self.chunk, self.said, self.next, self.teacher))

    @property
    def score(self) -> float | None:
        """The score of its verdict; None: there is no verdict yet, or only a teacher's scores."""
        return None if self.verdict is None else self.verdict.score

    @property
    def own_length(self) -> int:
        """Number of tokens of its chunk."""
        return self.head.context + self.head.sampled


def branch_of(turn: KnownTurn) -> list[tuple[KnownTurn, int]]:
    """Return what the tokens up to the end of a turn consist of, the oldest first: turns, and of each the
    number of the first tokens of its chunk that belong to it.
    """
    parts = [(turn, turn.own_length)]
    limit, before = turn.head.shared, turn.parent
    while before is not None and limit > 0:
        kept = min(before.own_length, limit - before.head.shared)
        if kept > 0:
            parts.append((before, kept))
        limit, before = min(limit, before.head.shared), before.parent
    return parts[::-1]


class Gateway(NamedTuple):
    """How far the ledger is with one gateway's journal."""

    id: int
    """From 1 on."""
    name: str
    durable: int
    """Number of the last entry that the ledger holds."""


@dataclass
class RecoveredTurns:
    """The state of live users that a restart goes on with."""

    gateways: list[Gateway] = field(default_factory=list[Gateway])
    turns: list[KnownTurn] = field(default_factory=list[KnownTurn])
    """All turns of sessions of which anything may still be needed, in the order of their entries."""
    open: set[int] = field(default_factory=set[int])
    """Numbers of the turns that have not ended."""
    ended_sessions: set[int] = field(default_factory=set[int])
    """Those of the sessions that no further turn continues."""
    counts: dict[str, int] = field(default_factory=dict[str, int])
    """Number of turns in each state, all turns included."""
    trained: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Key and score of the turns that were trained last, the newest last."""
