"""Sessions from the entries of a journal, after the process was killed.

Requests that ran then are lost: their clients have seen the connection break. All ended turns are restored.
Their texts are decoded again when they are needed.
"""

import json
from typing import cast

from slipstream.rollout.gateway.conversations import ChatMessage, RewardedTurn, TakenReward
from slipstream.rollout.gateway.sessions.placing import Id, SessionTable
from slipstream.rollout.gateway.sessions.repeating import last_answer
from slipstream.rollout.gateway.sessions.stored import (
    ChainTurn,
    EndedTurn,
    SessionState,
    ancestor,
    append_answer,
    messages_of,
)
from slipstream.rollout.tokens.conversation.chains import length_of, resume
from slipstream.rollout.tokens.conversation.sameness import marks_of
from slipstream.rollout.tokens.record import decode_chunks
from slipstream.rollout.tokens.turn_entries import (
    HELPER,
    Entry,
    Forgotten,
    HeldReward,
    NextState,
    Opened,
    SessionEnd,
    Turn,
    TurnType,
    UserReward,
)


class Restoring:
    """Takes the entries of a journal, in order."""

    def __init__(self, table: SessionTable) -> None:
        self._table = table
        self._sessions: dict[int, SessionState] = {}
        """Sessions by the number of a turn."""
        self._heard: dict[Id, set[int]] = {}
        """By session: turns whose next state has come, while the request that has brought it has no entry."""

    def take(self, number: int, entry: Entry) -> None:
        """Take an entry. Raises CorruptRecord, ValueError."""
        match entry:
            case Turn() as turn:
                self._turn(number, turn)
            case NextState() as state:
                session = self._sessions.get(state.turn)
                if session is not None:
                    self._heard.setdefault((session.key, session.name), set()).add(state.turn)
                    for history in session.pair_number(state.turn):
                        self._table.settled(session, history)
                    self._table.used(session, session.used_s)
            case UserReward() as reward:
                self._given(reward)
            case Opened() as opened:
                self._opened(opened)
            case HeldReward() as held:
                session = self._table.get(held.key, held.session)
                if session is not None and session.group is not None:
                    session.held = held
                    if held.once:
                        given = TakenReward(session.name, [], (), held.digest)
                        self._table.note_given(session, held.once, given)
            case SessionEnd() as end:
                session = self._table.get(end.key, end.session)
                if session is not None:
                    self._table.end(session)
            case Forgotten() as forgotten:
                for session in self._table.matching(forgotten.session, forgotten.key):
                    self._table.remove(session)
            case _:
                pass

    def _given(self, reward: UserReward) -> None:
        """Remember a reward, for lists, and for clients that send it again."""
        session = self._sessions.get(reward.turn)
        if session is None:
            return
        place, turn = next(
            (place, turn) for place, turn in enumerate(session.ended_turns) if turn.number == reward.turn
        )
        turn.rewards[reward.name] = reward.reward
        if reward.group is not None and session.group is not None:
            session.group.is_over, session.held = True, None
        if not reward.once:
            return
        rewarded = RewardedTurn(session.name, place, turn.request, reward.reward)
        before = self._table.given(session.key, reward.once)
        turns = [rewarded] if before is None else [*before.turns, rewarded]
        self._table.note_given(session, reward.once, TakenReward(session.name, turns, (), reward.digest))

    def _opened(self, opened: Opened) -> None:
        session = self._table.get(opened.key, opened.session)
        if session is None:
            session = SessionState(opened.key, opened.session, 0.0)
            self._table.add(session)
        tags = cast("dict[str, object]", json.loads(bytes(opened.tags)))
        self._table.opened(session, tags, opened)
        self._table.used(session, session.used_s)

    def _turn(self, number: int, entry: Turn) -> None:
        session = self._table.get(entry.key, entry.session)
        if session is None:
            session = SessionState(entry.key, entry.session, entry.ended_s)
            self._table.add(session)
        session.ended = False
        answer = cast(ChatMessage, json.loads(bytes(entry.answer)))
        self._table.add_ended(session, EndedTurn.of(number, entry, answer))
        self._sessions[number] = session
        parent = None if entry.parent is None else session.turn(entry.parent)
        if parent is not None or entry.parent is None:  # otherwise its parent is evicted, and it with it
            size = session.size
            turn = _stored(session, entry, answer, parent)
            self._hear(session, entry, turn)
            turn.number = number
            turn.continue_anchor()
            session.add_turn(turn)
            for node in turn.endings:
                self._table.list_answer(session, node)
            self._table.account(session, size)
        if bytes(entry.exchange):
            self._table.name_answer(session, entry.response, number, entry.previous)
        self._table.used(session, entry.ended_s)

    def _hear(self, session: SessionState, entry: Turn, turn: ChainTurn) -> None:
        """Take out the turn whose next state a request has brought. If it has rewritten the answer that it
        repeats last, its next state is nobody's."""
        if entry.choice or not _is_main(entry):
            return
        heard = self._heard.get((session.key, session.name), set())
        last = last_answer(messages_of(turn.node.before))
        if turn.parent is not None and turn.parent.number in heard:
            heard.discard(turn.parent.number)
        elif last < 0 or last >= entry.kept:
            if heard:
                heard.remove(max(heard))
            elif last >= 0:
                session.doubt()


def _is_main(entry: Turn) -> bool:
    """True for a turn that is a main turn, or that would be one if it could be trained."""
    return entry.turn_type is TurnType.MAIN or bool(entry.reason and not entry.reason.startswith(HELPER))


def _stored(session: SessionState, entry: Turn, answer: ChatMessage, parent: ChainTurn | None) -> ChainTurn:
    context: list[int] = []
    tokens: list[int] = []
    for part in decode_chunks(entry.chunk):
        context += part.context.tolist()
        tokens += part.tokens.tolist()
    messages = cast("list[ChatMessage]", json.loads(bytes(entry.messages)))
    kept = None if parent is None or not entry.kept else ancestor(parent.node, entry.kept)
    marks = marks_of(messages, b"" if kept is None else kept.mark.history)
    last = session.add_messages(kept, messages, marks)
    prompt = resume(None if parent is None else parent.tail, entry.shared, context)
    return ChainTurn(
        node=session.add_answer(last, answer),
        tail=append_answer(prompt, tokens, answer, entry),
        prompt_length=length_of(prompt),
        parent=parent,
        shared=entry.shared,
        trained=entry.may_be_trained,
    )
