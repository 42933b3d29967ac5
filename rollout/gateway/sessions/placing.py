"""All sessions of a process: found by name or by history, and bounded in number and memory.

    open ──── most memory taken: evicted ───► cleared: next states and rewards only ──┐
      │                                                                               │
      ├── last request has ended it ──► ended: rewards only ─────────────────────────►├──► removed
      └── idle, or evicted while no turn waits for a next state ─────────────────────►┘

A session in which a turn waits for its next state is not removed before it has been idle for long enough,
unless the place is for a key that holds fewer sessions. If memory is short it is cleared: the turn is in the
journal, and the digest of its history stays here, so that its next state is still paired.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from slipstream.rollout.gateway.conversations import (
    ChatMessage,
    NamedAnswer,
    TakenReward,
    TooManySessions,
    UnknownTurn,
)
from slipstream.rollout.gateway.sessions.counters import SessionCounters
from slipstream.rollout.gateway.sessions.repeating import (
    asked_before,
    known_answer,
    last_answer,
    most_repeated,
    repeats_at,
)
from slipstream.rollout.gateway.sessions.stored import EndedTurn, MessageNode, SessionGroup, SessionState
from slipstream.rollout.tokens.conversation.sameness import (
    Mark,
    digest_of_exchange,
    ids_of_calls,
    is_reminder,
    is_step,
    results_of,
)
from slipstream.rollout.tokens.turn_entries import Opened

MOST_COMPARED = 64
"""Sessions with equal answers that are compared with a conversation, message by message. Of more, only those
are that have the answer after the same message, up to blocks in tags and blanks."""

Id = tuple[str, str]
"""Name of the API key, and name of the session. Two keys never share a session."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of the sessions of a process."""

    sessions: int
    size: int
    """Bytes of all turns and messages."""
    idle_timeout_s: float
    """Seconds without a request after which a session ends."""
    per_key: int | None = None
    """Number of sessions that one key may hold; None: as many as there may be."""


@dataclass(slots=True)
class _Share:
    """What one key holds. In each table, the session that has rested longest is first."""

    sessions: OrderedDict[Id, SessionState] = field(default_factory=OrderedDict[Id, SessionState])
    removable: OrderedDict[Id, SessionState] = field(default_factory=OrderedDict[Id, SessionState])
    """Sessions in which nothing runs and nothing waits."""
    filled: OrderedDict[Id, SessionState] = field(default_factory=OrderedDict[Id, SessionState])
    """Sessions with turns."""
    size: int = 0

    def oldest(self, *, waits_too: bool) -> SessionState | None:
        """Return the session to evict; None: there is none. ``waits_too``: also one that waits."""
        session = next(iter(self.removable.values()), None)
        if session is None and waits_too:
            session = next((one for one in self.sessions.values() if not one.running), None)
        return session

    def resting(self) -> Iterator[SessionState]:
        """Yield the sessions with turns in which nothing runs."""
        return (session for session in self.filled.values() if not session.running)


class SessionTable:
    """All sessions of a process."""

    def __init__(self, limits: SessionLimits, counters: SessionCounters) -> None:
        self._limits = limits
        self._counters = counters
        self._sessions: OrderedDict[Id, SessionState] = OrderedDict()
        """The one that has rested longest is first."""
        self._shares: dict[str, _Share] = {}
        """What each key holds."""
        self._histories: dict[tuple[str, bytes], OrderedDict[Id, SessionState]] = {}
        """By key and history: the sessions in which a turn ends there. Those in which it waits for its next
        state are first."""
        self._answers: dict[tuple[str, bytes], dict[Id, SessionState]] = {}
        """By key and by the digest of an answer, alone and with the message before it, and of that message
        alone: sessions with a turn that has it."""
        self._named: dict[tuple[str, str], SessionState] = {}
        """Sessions by key and by the ids of requests whose answers can be named."""
        self._with_id: dict[tuple[str, str], list[SessionState]] = {}
        """By key and by the id of a request or of a tool call: sessions with a turn that has it."""
        self._groups: dict[tuple[str, str], SessionGroup] = {}
        """By key and name."""
        self._openings: dict[tuple[str, str], list[Opened]] = {}
        """Entries of opened sessions, by key and by the names of the requests that have opened them."""
        self._given: dict[tuple[str, str], TakenReward] = {}
        """Rewards by key and by the names of their givings."""
        self.size = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, key: str, name: str) -> SessionState | None:
        """Return a session; None: there is none of this name."""
        return self._sessions.get((key, name))

    def known(self, key: str, name: str) -> SessionState:
        """Return a session. Raises UnknownTurn."""
        session = self.get(key, name)
        if session is None:
            raise UnknownTurn(f"there is no session {name}, or it has ended long ago")
        return session

    def add(self, session: SessionState) -> None:
        """Add a session."""
        self._sessions[session.key, session.name] = session
        share = self._shares.setdefault(session.key, _Share())
        share.sessions[session.key, session.name] = session
        share.size += session.size

    def opened(self, session: SessionState, tags: Mapping[str, object], entry: Opened) -> None:
        """Note that a client has opened a session, as its entry says."""
        session.tags, session.once = tags, entry.once
        if entry.once:
            self._openings.setdefault((session.key, entry.once), []).append(entry)
        if entry.group:
            group = SessionGroup(entry.group, entry.size)
            named = self._groups.setdefault((session.key, entry.group), group)
            session.group = named
            named.sessions.append(session)

    def opening(self, key: str, once: str) -> Sequence[Opened]:
        """Return the entries of the sessions that a request of this name has opened; empty: none has, or all
        of them are gone."""
        return self._openings.get((key, once), ())

    def of_key(self, key: str) -> list[SessionState]:
        """Return all sessions of a key, the one that has rested longest first."""
        return list(self._shares.get(key, _Share()).sessions.values())

    def make_room(self, key: str, now_s: float) -> SessionState | None:
        """Make room for another session of a key; return the one that had to go. Raises TooManySessions.

        Keys that hold more sessions than this one pay first, the largest before the others. They lose also
        what waits for a next state, so that no key can lock another one out.
        """
        own = self._shares.get(key, _Share())
        if self._limits.per_key is not None and len(own.sessions) >= self._limits.per_key:
            payers = [own]
        elif len(self._sessions) < self._limits.sessions:
            return None
        else:
            larger = [share for share in self._shares.values() if len(share.sessions) > len(own.sessions)]
            payers = [*sorted(larger, key=lambda share: -len(share.sessions)), own]
        for share in payers:
            session = share.oldest(waits_too=share is not own)
            if session is not None:
                self._count_evicted(session)
                self.remove(session)
                return session
        self._counters.refused += 1
        oldest = next(iter(own.sessions.values()), None) or next(iter(self._sessions.values()))
        raise TooManySessions(
            f"{len(own.sessions)} sessions of this key are open, and each has a turn that waits for its next "
            "state or runs; end sessions with X-Session-Done",
            max(1.0, oldest.used_s + self._limits.idle_timeout_s - now_s),
        )

    def used(self, session: SessionState, now_s: float) -> None:
        """Note a request or an answer, or anything else that changes what may happen to a session."""
        identity = (session.key, session.name)
        if self._sessions.get(identity) is not session:
            return
        session.used_s = max(session.used_s, now_s)
        self._sessions.move_to_end(identity)
        share = self._shares[session.key]
        share.sessions.move_to_end(identity)
        for table, belongs in (
            (share.removable, not session.running and not session.waiting),
            (share.filled, bool(session.turns)),
        ):
            if belongs:
                table[identity] = session
                table.move_to_end(identity)
            else:
                table.pop(identity, None)

    def rest_from(self, now_s: float) -> None:
        """Take all sessions for used at this time. Their order stays."""
        for session in self._sessions.values():
            session.used_s = now_s

    def shrink(self) -> list[SessionState]:
        """Clear sessions until they fit into memory; return those that have ended by it.

        The key with the most memory pays, as long as another has less.
        """
        excess = self.size - self._limits.size
        if excess <= 0:
            return []
        chosen: list[SessionState] = []
        sizes = {key: share.size for key, share in self._shares.items()}
        resting = {key: share.resting() for key, share in self._shares.items()}
        while excess > 0 and resting:
            key = max(resting, key=lambda key: sizes[key])
            session = next(resting[key], None)
            if session is None:
                del resting[key]
                continue
            chosen.append(session)
            excess -= session.size
            sizes[key] -= session.size
        for session in chosen:
            self._count_evicted(session)
            if session.waiting:
                self._counters.evicted_histories += 1
                self.clear(session)
            else:
                self.remove(session)
        return [session for session in chosen if not session.waiting]

    def idle(self, now_s: float) -> list[SessionState]:
        """Return the sessions that have rested for too long."""
        idle: list[SessionState] = []
        for session in self._sessions.values():
            if now_s - session.used_s < self._limits.idle_timeout_s:
                break
            if not session.running:
                idle.append(session)
        return idle

    def account(self, session: SessionState, before: int) -> None:
        """Note that a session took ``before`` bytes until now."""
        self.size += session.size - before
        if (session.key, session.name) in self._sessions:
            self._shares[session.key].size += session.size - before

    def clear(self, session: SessionState) -> None:
        """Drop the turns and messages of a session, but not what next states and rewards need."""
        before = session.size
        session.clear()
        self.account(session, before)
        self._unlist(session, frozenset(session.cleared))
        if (share := self._shares.get(session.key)) is not None:
            share.filled.pop((session.key, session.name), None)

    def end(self, session: SessionState) -> None:
        """Drop all of a session but what rewards need."""
        self.clear(session)
        session.cleared.clear()
        self._unlist(session, frozenset())
        self._forget_names(session)
        session.waiting = 0
        session.doubtful.clear()
        session.ending, session.ended = False, True
        self.used(session, session.used_s)

    def matching(self, name: str | None, key: str | None) -> list[SessionState]:
        """Return the sessions of a name, of a key, or of both."""
        return [
            session
            for session in self._sessions.values()
            if name in (None, session.name) and key in (None, session.key)
        ]

    def remove(self, session: SessionState) -> None:
        """Remove a session."""
        self.size -= session.size
        identity = (session.key, session.name)
        if self._sessions.pop(identity, None) is not None:
            share = self._shares[session.key]
            share.size -= session.size
            for table in (share.sessions, share.removable, share.filled):
                table.pop(identity, None)
            if not share.sessions:
                del self._shares[session.key]
        session.size = 0
        self._unlist(session, frozenset())
        self._forget_names(session)
        self._forget_rewards(session)

    def list_answer(self, session: SessionState, answer: MessageNode) -> None:
        """Note that a turn of a session ends with an answer, and waits for its next state."""
        identity, mark = (session.key, session.name), answer.mark
        sessions = self._histories.setdefault((session.key, mark.history), OrderedDict())
        if identity not in sessions:
            sessions[identity] = session
            session.histories.append(mark.history)
        digests = {mark.alone}
        for message in asked_before(answer):
            digests |= {digest_of_exchange(message, mark.alone), digest_of_exchange(message, b"")}
        for digest in digests:
            same = self._answers.setdefault((session.key, digest), {})
            if identity not in same:
                same[identity] = session
                session.answered.append(digest)

    def settled(self, session: SessionState, history: bytes) -> None:
        """Note that no turn of a session waits for its next state at a history any longer."""
        sessions = self._histories.get((session.key, history))
        if sessions is not None and (session.key, session.name) in sessions:
            sessions.move_to_end((session.key, session.name))

    def name_answer(self, session: SessionState, request: str, turn: int, previous: str) -> None:
        """Note that later requests can name the answer to a request, whose entry has the number ``turn``."""
        before = session.size
        session.name_answer(request, turn, previous)
        self.account(session, before)
        self._named[session.key, request] = session

    def add_ended(self, session: SessionState, turn: EndedTurn) -> None:
        """Note a turn whose entry has its number, for rewards."""
        session.ended_turns.append(turn)
        for id_ in turn.ids:
            sessions = self._with_id.setdefault((session.key, id_), [])
            if session not in sessions:
                sessions.append(session)

    def with_id(self, key: str, id_: str) -> Sequence[SessionState]:
        """Return the sessions with a turn that has the id of a request or of a tool call."""
        return self._with_id.get((key, id_), ())

    def note_given(self, session: SessionState, once: str, given: TakenReward) -> None:
        """Note that a reward was given whose giving has a name."""
        session.given[once] = self._given[session.key, once] = given

    def given(self, key: str, once: str) -> TakenReward | None:
        """Return the reward that was given under a name; None: none."""
        return self._given.get((key, once))

    def answer_of(self, key: str, request: str) -> NamedAnswer | None:
        """Return the answer to a request; None: none that can be named, or not any more."""
        session = self._named.get((key, request))
        return None if session is None else session.named[request]

    def _forget_names(self, session: SessionState) -> None:
        for request in session.named:
            del self._named[session.key, request]
        session.named.clear()

    def _forget_rewards(self, session: SessionState) -> None:
        for turn in session.ended_turns:
            for id_ in turn.ids:
                sessions = self._with_id.get((session.key, id_), [])
                if session in sessions:
                    sessions.remove(session)
                if not sessions:
                    self._with_id.pop((session.key, id_), None)
        for once in session.given:
            self._given.pop((session.key, once), None)
        opening = self._openings.get((session.key, session.once), ())
        if not any((session.key, each.session) in self._sessions for each in opening):
            self._openings.pop((session.key, session.once), None)
        if session.group is not None:
            session.group.is_over = True
            session.group.sessions.remove(session)
            if not session.group.sessions:
                del self._groups[session.key, session.group.name]

    def is_asked(self, key: str, message: ChatMessage) -> bool:
        """True if a turn of a key has answered a message."""
        return (key, digest_of_exchange(message, b"")) in self._answers

    def find(self, key: str, messages: Sequence[ChatMessage], marks: Sequence[Mark]) -> SessionState | None:
        """Return the session with the longest stored history with which a conversation begins.

        Several sessions of a key may have it, for example where greedy answers to one greeting are equal.
        Then it is the one that has waited longest for a next state. If none waits, nothing tells them
        apart: None, so that no two clients ever share one. Where the history does not hold the last answer,
        another session may: then the one with that answer counts.
        """
        last = last_answer(messages)
        for place in range(len(marks) - 1, -1, -1):
            sessions = self._histories.get((key, marks[place].history))
            if sessions:
                break
        else:
            return self._find_rewritten(key, messages, marks, last)
        first = next(iter(sessions.values()))
        if place < last and (session := self._find_rewritten(key, messages, marks, last, place)) is not None:
            if len(sessions) == 1:  # what followed there has begun another session
                first.doubt()
            return session
        if len(sessions) == 1 or _waits(first, marks[place].history):
            return first
        self._counters.ambiguous += 1
        return None

    def find_called(self, key: str, messages: Sequence[ChatMessage]) -> SessionState | None:
        """Return the session that has made the tool calls whose ids a conversation repeats last.

        None: it repeats none, or several sessions have made one of this id: not all dialects make up ids that
        differ.
        """
        called = {
            session.name: session
            for message in messages[max(last_answer(messages), 0) :]
            for id_ in (*ids_of_calls(message), results_of(message))
            if isinstance(id_, str) and id_
            for session in self.with_id(key, id_)
        }
        return next(iter(called.values())) if len(called) == 1 else None

    def _find_rewritten(
        self, key: str, messages: Sequence[ChatMessage], marks: Sequence[Mark], last: int, beyond: int = -1
    ) -> SessionState | None:
        """Return the session of a conversation whose history was rewritten; None: none, or several may be.

        The session has the answer that the conversation repeats last, after the same message, if only
        rewritten. The client may have answered messages of its own since: then the session's turn must wait.
        An answer up to the place ``beyond`` does not count.
        """
        is_asked = partial(self.is_asked, key)
        place = known_answer(messages, last, lambda at: (key, marks[at].alone) in self._answers, is_asked)
        found = self._repeating(key, messages, marks, place) if place > beyond else []
        if len(found) > 1:
            self._counters.ambiguous += 1
            for session in found:
                session.doubt()
        if len(found) != 1:
            return None
        [session] = found
        waits = (t.waits and repeats_at(t, messages, marks, place) for t in session.newest())
        return session if place == last or any(waits) else None

    def _repeating(
        self, key: str, messages: Sequence[ChatMessage], marks: Sequence[Mark], place: int
    ) -> list[SessionState]:
        """Return the sessions with most of a conversation up to the answer in a place, and at least with the
        message before it, if only rewritten. More than can be compared are returned as they are."""
        found = self._with_answer(key, messages, marks, place)
        if len(found) > MOST_COMPARED:
            return found
        lengths = [most_repeated(each, messages, marks, place) for each in found]
        most = max([2, *lengths])
        return [each for each, length in zip(found, lengths, strict=True) if length == most]

    def _with_answer(
        self, key: str, messages: Sequence[ChatMessage], marks: Sequence[Mark], place: int
    ) -> list[SessionState]:
        """Return sessions that may have the answer in a place of a conversation, after the same message.

        A key may have thousands of sessions with one short answer: none of another key waits for them.
        """
        if place < 1:
            return []
        alone = marks[place].alone
        same = self._answers.get((key, alone), {})
        if len(same) > MOST_COMPARED:
            said = [m for m in messages[:place] if not is_reminder(m)] or messages[place - 1 : place]
            asked = (said[-1], *[m for m in said if not is_step(m)][-1:])
            exchanges = [self._answers.get((key, digest_of_exchange(each, alone)), {}) for each in asked]
            same = exchanges[0] | exchanges[-1]
        return list(same.values())

    def _unlist(self, session: SessionState, keep: frozenset[bytes]) -> None:
        for history in session.histories:
            if history in keep:
                continue
            histories = self._histories[session.key, history]
            del histories[session.key, session.name]
            if not histories:
                del self._histories[session.key, history]
        session.histories = [history for history in session.histories if history in keep]
        for digest in session.answered:
            sessions = self._answers[session.key, digest]
            del sessions[session.key, session.name]
            if not sessions:
                del self._answers[session.key, digest]
        session.answered.clear()

    def _count_evicted(self, session: SessionState) -> None:
        self._counters.evicted_tokens += sum(turn.length - turn.shared for turn in session.turns)


def _waits(session: SessionState, history: bytes) -> bool:
    """True if a turn of a session waits for a next state at the end of a history."""
    node = session.nodes.get(history)
    return history in session.cleared or (node is not None and any(turn.waits for turn in node.turns))
