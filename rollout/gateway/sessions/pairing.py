"""Next states: each turn gets the messages that came after it, once.

A next state belongs to the turn whose answer the request repeats, and is recorded when the request arrives.
Concurrent requests of a session therefore never exchange theirs. A request may even repeat an answer that
has not ended: the client has read it up to there. Its messages wait until the turn ends, and are taken if
its answer is, or begins with, what the client repeats.

What a side turn adds is no reaction of a user, so that the client's own side turns are nobody's next state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.rollout.gateway.conversations import ChatMessage
from slipstream.rollout.gateway.sessions.continuing import Predecessor
from slipstream.rollout.gateway.sessions.counters import SessionCounters
from slipstream.rollout.gateway.sessions.stored import ChainTurn, SessionState
from slipstream.rollout.tokens.conversation.sameness import Mark, role_of, text_of
from slipstream.rollout.tokens.turn_entries import Entry, NextState, as_json


@dataclass(frozen=True, slots=True)
class Expected:
    """A next state that waits for the end of an answer."""

    alone: bytes
    """Digest of the answer as the client has repeated it."""
    beginning: str
    """Text with which the answer may begin instead; empty: it must be the same."""
    reaction: Sequence[ChatMessage]


def pair(session: SessionState, before: Predecessor, counters: SessionCounters) -> tuple[list[Entry], bytes]:
    """Return the next state that a request brings, if any, and the history at whose end it was awaited."""
    reaction = reaction_of(before.reaction)
    if not reaction or not (session.turns or session.cleared):
        return [], b""
    if before.evicted is not None:
        number = session.pair_cleared(before.evicted)
        return _next_state(number, reaction, counters), before.evicted
    turn = before.answered
    if turn is None:
        session.doubt()
        return _next_state(None, reaction, counters), b""
    if not turn.trained:
        return [], b""
    if not turn.waits or turn.number is None:
        if any(other.waits and other.node.mark.alone == turn.node.mark.alone for other in session.newest()):
            session.doubt()  # an equal answer may be meant
        return _next_state(None, reaction, counters), b""
    session.pair(turn)
    return _next_state(turn.number, reaction, counters), turn.node.mark.history


def _next_state(
    number: int | None, reaction: Sequence[ChatMessage], counters: SessionCounters
) -> list[Entry]:
    if number is None:
        counters.unpaired += 1
        return []
    counters.next_states += 1
    return [NextState(number, as_json(reaction))]


def reaction_of(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages without those that the policy is to continue."""
    return [message for message in messages if role_of(message) != "assistant"]


def expected_of(
    messages: Sequence[ChatMessage], marks: Sequence[Mark], answered: Sequence[Mark], *, alone: bool
) -> Expected | None:
    """Return the next state that a request brings for a running turn; None: it does not repeat its answer.

    ``answered`` are the messages of the running turn's request. ``alone`` says that no other answer to them
    is running, so that the beginning of the answer is enough.
    """
    place = len(answered)
    if not place or len(messages) <= place or marks[place - 1].history != answered[-1].history:
        return None
    repeated, rest = messages[place], messages[place + 1 :]
    if role_of(repeated) != "assistant" or not rest or len(reaction_of(rest)) < len(rest):
        return None
    text = text_of(repeated)
    return Expected(marks[place].alone, text.strip() if alone and isinstance(text, str) else "", rest)


def fulfilled(turn: ChainTurn, expected: Sequence[Expected]) -> Sequence[ChatMessage]:
    """Return the next state of a turn that has just ended, among those that waited for it."""
    text = text_of(turn.node.message)
    for item in expected:
        begins = isinstance(text, str) and item.beginning and text.strip().startswith(item.beginning)
        if item.alone == turn.node.mark.alone or begins:
            return item.reaction
    return ()
