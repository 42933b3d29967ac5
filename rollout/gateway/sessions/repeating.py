"""What a conversation repeats of a stored one, although agents rewrite what they send again."""

from collections.abc import Callable, Sequence

from slipstream.rollout.gateway.conversations import ChatMessage
from slipstream.rollout.gateway.sessions.stored import ChainTurn, MessageNode, SessionState
from slipstream.rollout.tokens.conversation.sameness import (
    Mark,
    is_answer,
    is_reminder,
    is_rewritten,
    is_step,
    role_of,
)

MOST_OWN = 8
"""Answers of a client's own after one of the policy's."""

MOST_STEPS = 64
"""Messages before an answer among which its question is looked for."""


def last_answer(messages: Sequence[ChatMessage]) -> int:
    """Return the place of the last answer to which a conversation says something; -1: there is none."""
    said = False
    for place in range(len(messages) - 1, -1, -1):
        if role_of(messages[place]) != "assistant":
            said = True
        elif said:
            return place
    return -1


def known_answer(
    messages: Sequence[ChatMessage],
    last: int,
    is_known: Callable[[int], bool],
    is_asked: Callable[[ChatMessage], bool],
) -> int:
    """Return the place of the last known answer in a conversation, from ``last`` back; -1: none is known, or
    something else than exchanges of the client's own follows it.

    ``is_asked`` says that the policy has answered a message, so that the client has not done so itself.
    """
    for _ in range(MOST_OWN):
        if last < 0 or is_known(last):
            return last
        before = messages[last - 1] if last else None
        if before is None or role_of(before) != "user" or is_step(messages[last]) or is_asked(before):
            return -1
        last = last_answer(messages[:last])
    return -1


def said_since(messages: Sequence[ChatMessage], place: int) -> Sequence[ChatMessage]:
    """Return what has been said to the answer in a place: all that follows but exchanges of the client's own,
    an answer of its own to a message of its own each. A result that one of them follows is none.
    """
    said: list[ChatMessage] = []
    for message in messages[place + 1 : -1]:
        if role_of(message) != "assistant":
            said.append(message)
        elif said and role_of(said[-1]) == "user":
            said.pop()
    return [*said, *messages[place + 1 :][-1:]]


def repeated(turn: ChainTurn, messages: Sequence[ChatMessage], marks: Sequence[Mark], last: int) -> int:
    """Return how many messages a turn has in common with a conversation, as ``_in_common`` counts them."""
    return max(_in_common(node, messages, marks, last) for node in turn.endings)


def _in_common(answer: MessageNode, messages: Sequence[ChatMessage], marks: Sequence[Mark], last: int) -> int:
    """Return how many messages up to an answer are those of a conversation up to a place, the last one first.
    Each may be rewritten. Left out are messages that are reminders alone, and the calls and results between a
    question and its answer, if the conversation has none there.
    """
    length, place = 0, last
    node: MessageNode | None = answer
    while node is not None and place >= 0:
        message = messages[place]
        is_same = is_rewritten if length else is_answer
        if node.mark.alone == marks[place].alone or is_same(node.message, message):
            length, place, node = length + 1, place - 1, node.before
        elif length and role_of(node.message) == role_of(message) == "tool":
            place, node = place - 1, node.before
        elif length and is_reminder(message):
            place -= 1
        elif length and (is_reminder(node.message) or (is_step(node.message) and role_of(message) == "user")):
            node = node.before
        else:
            break
    return length


def asked_before(answer: MessageNode) -> list[ChatMessage]:
    """Return the messages after which a conversation may repeat an answer: the one before it, and that before
    the calls and results that have led to it. Messages that are reminders alone are neither."""
    found: list[ChatMessage] = []
    node = answer.before
    for _ in range(MOST_STEPS):
        if node is None:
            break
        if not is_reminder(node.message) and not (found and is_step(node.message)):
            found.append(node.message)
            if not is_step(node.message):
                break
        node = node.before
    return found


def has_answer(turn: ChainTurn, mark: Mark) -> bool:
    """True if a turn has an answer as it is."""
    return any(node.mark.alone == mark.alone for node in turn.endings)


def repeats_at(turn: ChainTurn, messages: Sequence[ChatMessage], marks: Sequence[Mark], place: int) -> bool:
    """True if a conversation has a turn's answer in a place, after the same message, if only rewritten."""
    return repeated(turn, messages, marks, place) > 1


def most_repeated(
    session: SessionState, messages: Sequence[ChatMessage], marks: Sequence[Mark], place: int
) -> int:
    """Return how much of a conversation up to the answer in a place a session repeats in one of its turns."""
    turns = [turn for turn in session.newest() if has_answer(turn, marks[place])]
    return max((repeated(turn, messages, marks, place) for turn in turns), default=0)
