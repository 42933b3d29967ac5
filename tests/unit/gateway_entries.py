"""Entries as a gateway records them, for tests of what stores and carries them."""

import random

import msgspec

from slipstream.rollout.tokens.record import encode_chunk
from slipstream.rollout.tokens.trajectory import Finish
from slipstream.rollout.tokens.turn_entries import (
    Forgotten,
    HeldReward,
    NextState,
    Opened,
    SessionEnd,
    Turn,
    TurnType,
    UserReward,
)


def turn(session: str = "s", key: str = "k", tokens: int = 3, seed: int = 0, **changes) -> Turn:
    draw = random.Random(f"{session} {seed}")
    ids = [draw.randrange(1000) for _ in range(tokens)]
    entry = Turn(
        session=session,
        key=key,
        parent=None,
        shared=0,
        turn_type=TurnType.MAIN,
        reason="",
        spans=((3, tokens),),
        finish=Finish.STOP,
        cancelled=False,
        started_s=1.5,
        ended_s=2.5,
        kept=0,
        messages=msgspec.Raw(msgspec.json.encode([{"role": "user", "content": f"{session} ü {seed}"}])),
        answer=msgspec.Raw(b'{"role":"assistant","content":"yes"}'),
    )
    chunk = encode_chunk([1, 2], ids, [-draw.random() for _ in ids])
    return msgspec.structs.replace(entry, **{"chunk": chunk} | changes)


def next_state(number: int, text: str = "thanks") -> NextState:
    return NextState(number, msgspec.Raw(msgspec.json.encode([{"role": "user", "content": text}])))


def reward(number: int, value: float = 1.0) -> UserReward:
    return UserReward(number, value)


def end(session: str = "s", key: str = "k") -> SessionEnd:
    return SessionEnd(session, key)


def opened(session: str = "s", key: str = "k") -> Opened:
    return Opened(session, key, "g", 2, msgspec.Raw(b'{"task":"sums"}'))


def held(session: str = "s", key: str = "k") -> HeldReward:
    return HeldReward(session, key, 0.5, 1.0, "tests", "once", b"12345678")


def forgotten(session: str | None = None, key: str | None = None) -> Forgotten:
    return Forgotten(session, key)


def plain(entry) -> tuple:
    """Return an entry as values that can be compared."""
    values = msgspec.structs.astuple(entry)
    return (type(entry).__name__, *(bytes(v) if isinstance(v, msgspec.Raw) else v for v in values))
