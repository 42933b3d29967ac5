"""Makes the question about a turn: the conversation up to it, and what came next. Nothing is changed.

    request of a turn = the first ``kept`` messages of (request and answer of its parent), then its own

Of each turn, its own messages are stored and no others. Those before are read along the parents, the newest
first, until there is no room for more.
"""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.rollout.ledger.rows.stored_turns import KnownTurn, branch_of
from slipstream.rollout.ledger.storage.database import LedgerError
from slipstream.rollout.reward.live import JudgedTurn
from slipstream.rollout.tokens.record import CorruptRecord, decode_chunks, decoded
from slipstream.rollout.tokens.trajectory import Messages

LONGEST_HISTORY = 1 << 20
"""Bytes of the turns before, as they are stored. Those that do not fit any more are left out."""

ID_BYTES = 4

Read = Callable[[bytes], bytes]
"""Returns the payload that references point to. Raises LedgerError."""


class Said(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request and its answer, as they are stored for the judge."""

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
    return decoded(_SAID, data, "the messages of a turn")


def question_of(
    turn: KnownTurn, read: Read, longest: int = LONGEST_HISTORY, *, with_ids: bool = False
) -> tuple[JudgedTurn, Messages]:
    """Return the question to a judge about a turn that has a next state. ``with_ids``: with the token
    ids of the prompt and of the answer.

    Raises LedgerError and CorruptRecord when the turn itself cannot be read.
    """
    assert turn.said is not None
    assert turn.next is not None
    said = decode_said(read(turn.said))
    history = history_of(turn, said.kept, read, longest)
    prompt_ids, answer_ids = ids_of(turn, read) if with_ids else (b"", b"")
    judged = JudgedTurn(
        said.session,
        said.key,
        history,
        _decoded(said.messages),
        _decoded(said.answer),
        turn.head.finish.value,
        turn.head.sampled,
        said.kept - len(history),
        prompt_ids,
        answer_ids,
    )
    return judged, _decoded(read(turn.next))


def ids_of(turn: KnownTurn, read: Read) -> tuple[bytes, bytes]:
    """Return the token ids of a turn's prompt and of its answer, int32.

    Raises LedgerError and CorruptRecord when one of the turns that the prompt repeats cannot be read.
    """
    before: list[bytes] = []
    for each, kept in branch_of(turn):
        if each.chunk is None:
            raise CorruptRecord("tokens before the turn are not there any more")
        for context, tokens, _ in decode_chunks(read(each.chunk)):
            if each is turn:
                return b"".join([*before, _int32(context)]), _int32(tokens)
            before.append((_int32(context) + _int32(tokens))[: ID_BYTES * kept])
    raise CorruptRecord("the turn has no tokens")


def _int32(ids: npt.NDArray[np.integer]) -> bytes:
    return ids.astype("<i4").tobytes()


def history_of(turn: KnownTurn, kept: int, read: Read, longest: int = LONGEST_HISTORY) -> Messages:
    """Return the newest of the ``kept`` messages before a turn's own, as far as there is room for them.

    A turn that is damaged, or that the session does not have, ends them.
    """
    newest_first: list[Messages] = []
    before, room = turn.parent, longest
    while kept and before is not None and before.said is not None:
        try:
            data = read(before.said)
            room -= len(data)
            if room < 0:
                break
            said = decode_said(data)
            stored = [*_decoded(said.messages), _decoded(said.answer)]
        except (LedgerError, CorruptRecord):
            break
        newest_first.append(stored[: max(0, kept - said.kept)])
        kept = min(kept, said.kept)
        before = before.parent
    return [message for messages in reversed(newest_first) for message in messages]


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptRecord(f"the messages of a turn are no JSON: {error}") from error
