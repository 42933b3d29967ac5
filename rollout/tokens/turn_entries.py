"""The entries of the append-only journal in which a gateway records its users. Plain data.

    session   the requests of one user's conversation, and of everything that branches off it
    branch    a chain of turns in which each prompt repeats all tokens of the turn before, and adds some
    turn      one request and its answer: context ids that no policy has sampled, then sampled ids

    gateway: journal ──entries, in order──► driver: ledger ──number of the last durable entry──► gateway

An entry has a number, from 1 on in each journal, and is never changed. The driver takes entries in their
order and acknowledges the last one that its ledger holds. Whatever was not acknowledged is sent again after
a break of the connection, and the ledger passes over numbers that it has: each entry counts exactly once.

The payload of a ``Turn`` is one chunk of ``tokens.record``: the context ids beyond those that the branch
shares with its parent, then the sampled ids with the engine's own log-prob of each. A turn's prompt consists
of the first ``shared`` ids of its parent's branch, and of the chunk's context. Journals and messages have the
chunk beside the encoded entry. No other entry has one.
"""

import json
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import TypeAlias, cast

import msgspec

from slipstream.rollout.tokens.record import CorruptRecord, decoded
from slipstream.rollout.tokens.trajectory import Finish


class TurnType(IntEnum):
    """True if a turn belongs to the task that is learned."""

    MAIN = 0
    SIDE = 1
    """Not trained: the client says so, or the trainer cannot reproduce how it was sampled."""


HELPER = "helper: "
"""How the reason of a side turn begins by which an agent helps itself. The kind of help follows."""


class Turn(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request and its answer. Written before the last byte of the answer leaves."""

    session: str
    key: str
    """Name of the API key."""
    parent: int | None
    """Number of the entry of the turn that this one continues; None: the branch begins with this turn."""
    shared: int
    """Tokens that the prompt has in common with the parent's branch, from its beginning. Fewer than the
    branch has if the client or the template has rewritten history: a new branch begins then."""
    turn_type: TurnType
    reason: str
    """Why a branch begins or a turn is a side turn; empty: neither, or the client asked for it."""
    spans: tuple[tuple[int, int], ...]
    """(version, tokens) of the sampled tokens, in order; they tile them."""
    finish: Finish
    cancelled: bool
    """The client has gone before the end: the turn is recorded and not trained."""
    started_s: float
    """Seconds since the epoch at which the request arrived."""
    ended_s: float
    kept: int
    """Messages of the parent that the request repeats, from the first one: those of the parent's request,
    then its answer. 0 without a parent."""
    messages: msgspec.Raw
    """JSON list: the messages of the request after the first ``kept``."""
    answer: msgspec.Raw
    """JSON: the message that was answered."""
    response: str = ""
    """Id of the request. Rewards name the answer by it, and later requests if there is an ``exchange``."""
    previous: str = ""
    """``response`` of the turn that the request continues by name; empty: it named none."""
    exchange: msgspec.Raw = msgspec.Raw(b"")
    """JSON: what the request has added, and the reply that the client got. Empty: no request can name the
    answer as the one before."""
    choice: int = 0
    """Place among the answers to the same prompt."""
    is_rewarded: bool = False
    """The client has opened the session, and rewards it itself: no judge is asked."""
    chunk: bytes | memoryview = b""
    """The payload: it is no part of the encoded entry."""

    @property
    def may_be_trained(self) -> bool:
        """True if it belongs to the task, and its client has waited for its end."""
        return self.turn_type is TurnType.MAIN and not self.cancelled


class NextState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The reaction to a turn: the messages that the next request of the branch has added."""

    turn: int
    """Number of the turn's entry."""
    messages: msgspec.Raw
    """JSON list of messages of users, tools and environments. Empty if the session has ended."""


class UserReward(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A reward that the client has given; it takes the place of a judge's."""

    turn: int
    reward: float
    name: str = ""
    """A turn's score is the sum of its rewards of different names. One of the same name replaces the one
    before."""
    once: str = ""
    """Name that the client has given the request, so that sending it again changes nothing; empty: none."""
    digest: bytes = b""
    """Digest of the request, where it has such a name."""
    group: tuple[float, float, int] | None = None
    """Mean, standard deviation and number of the rewards of its session's group; None: it has none. A turn's
    share in the reward of its session has the same share in the mean."""


class SessionEnd(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """No further turn follows in a session. Turns without a next state are judged without one.

    A client that uses the name of the session again begins anew: entries after this one have no parent before
    it.
    """

    session: str
    key: str
    """Name of the API key. Sessions of two keys are never the same, whatever their names."""
    unpaired: tuple[int, ...] = ()
    """Numbers of turns whose next states were lost. They are not judged: their conversations went on."""


class Forgotten(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Everything of a session, or of a key, is to be removed and never trained on again.

    With both given, it is the session of that name which belongs to the key.
    """

    session: str | None
    key: str | None


class Opened(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A client has opened a session, whose turns it rewards itself. The driver needs nothing of it."""

    session: str
    key: str
    group: str
    """Name that all sessions of its group have in common; empty: it belongs to none."""
    size: int
    """Number of sessions in the group, or that were opened together."""
    tags: msgspec.Raw
    """JSON object: what the client calls it, for lists of sessions."""
    once: str = ""
    """Name that the client has given the request, so that sending it again opens nothing; empty: none."""


class HeldReward(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The reward of a session whose group waits for those of others. The driver needs nothing of it."""

    session: str
    key: str
    value: float
    discount: float
    name: str = ""
    once: str = ""
    digest: bytes = b""


Entry: TypeAlias = Turn | NextState | UserReward | SessionEnd | Forgotten | Opened | HeldReward
"""Exactly one of the kinds below. ``KINDS`` gives each its number in journals and messages."""

KINDS: tuple[type[Entry], ...] = (Turn, NextState, UserReward, SessionEnd, Forgotten, Opened, HeldReward)


def as_json(value: object) -> msgspec.Raw:
    """Return JSON. Halves of surrogate pairs, which JSON may have and UTF-8 cannot, become question marks."""
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except (UnicodeEncodeError, OverflowError):  # the latter: integers of more than 64 bits
        return msgspec.Raw(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def chunk_of(entry: Entry) -> bytes | memoryview:
    """Return the payload of an entry."""
    return entry.chunk if isinstance(entry, Turn) else b""


def encode_entry(entry: Entry) -> tuple[int, bytes]:
    """Return the number of an entry's kind, and its fields as msgpack. JSON becomes binary data in it."""
    values = [getattr(entry, field.name) for field in _encoded_fields(type(entry))]
    return KINDS.index(type(entry)), _encoder.encode(
        [bytes(value) if isinstance(value, msgspec.Raw) else value for value in values]
    )


def decode_entry(kind: int, data: bytes | memoryview, chunk: bytes | memoryview = b"") -> Entry:
    """Return the entry that was encoded, with its payload. Raises CorruptRecord."""
    if not 0 <= kind < len(KINDS):
        raise CorruptRecord(f"an entry of kind {kind}, expected one of 0 to {len(KINDS) - 1}")
    what = f"an entry of kind {KINDS[kind].__name__}"
    values = msgspec.structs.astuple(decoded(_decoders[kind], data, what))
    fields = zip(values, _encoded_fields(KINDS[kind]), strict=True)
    make = cast("Callable[..., Entry]", KINDS[kind])
    payload = {"chunk": chunk} if KINDS[kind] is Turn else {}
    read = (msgspec.Raw(value) if field.type is msgspec.Raw else value for value, field in fields)
    return make(*read, **payload)


@cache
def _encoded_fields(kind: type[Entry]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return tuple(field for field in msgspec.structs.fields(kind) if field.name != "chunk")


def _decoder(kind: type[Entry]) -> msgspec.msgpack.Decoder[msgspec.Struct]:
    """Return a decoder of an entry's fields. A field of JSON is binary data there, because msgspec takes a
    ``Raw`` for a part of the message that it stands in.
    """
    fields = [
        (field.name, bytes if field.type is msgspec.Raw else field.type) for field in _encoded_fields(kind)
    ]
    return msgspec.msgpack.Decoder(msgspec.defstruct(f"{kind.__name__}Fields", fields, array_like=True))


_encoder = msgspec.msgpack.Encoder()
_decoders = [_decoder(kind) for kind in KINDS]
