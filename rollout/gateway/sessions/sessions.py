"""``Sessions``: the conversations of one gateway process, from a request to its entries.

    begin   place the request in a session, record the next state that it brings, choose its prompt
    end     store an answer, return its entry
    recorded, sweep, reward, end_session, forget, restore

Entries leave in the return values of ``begin``, ``end``, ``sweep`` and the others, and the caller appends
them to the journal at once and in this order. What arises elsewhere leaves with the next of these calls.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from slipstream.rollout.gateway.conversations import (
    Answer,
    Arrival,
    ClientReward,
    GivenBefore,
    ListedSession,
    NamedAnswer,
    PromptTooLong,
    TakenReward,
    TooManySessions,
    User,
)
from slipstream.rollout.gateway.sessions.continuing import (
    BranchReason,
    Predecessor,
    PromptPlan,
    predecessor_of_chat,
    prompt_of_chat,
    prompt_of_ids,
)
from slipstream.rollout.gateway.sessions.counters import SessionCounters
from slipstream.rollout.gateway.sessions.pairing import expected_of, fulfilled, pair
from slipstream.rollout.gateway.sessions.placing import Id, SessionLimits, SessionTable
from slipstream.rollout.gateway.sessions.recording import entry_of
from slipstream.rollout.gateway.sessions.restoring import Restoring
from slipstream.rollout.gateway.sessions.rewarding import give
from slipstream.rollout.gateway.sessions.running import RunningRequest
from slipstream.rollout.gateway.sessions.sampling import SamplingVerdict, judge_sampling
from slipstream.rollout.gateway.sessions.stored import ChainTurn, EndedTurn, SessionState, append_answer
from slipstream.rollout.tokens.conversation.chains import ids_of, length_of
from slipstream.rollout.tokens.conversation.sameness import Mark, marks_of
from slipstream.rollout.tokens.tokenizer import Decode
from slipstream.rollout.tokens.turn_entries import (
    Entry,
    Forgotten,
    NextState,
    Opened,
    SessionEnd,
    Turn,
    TurnType,
    as_json,
)

_Key = TypeVar("_Key", bound=Hashable)


class Sessions:
    """All sessions of one gateway process."""

    def __init__(
        self,
        limits: SessionLimits,
        *,
        temperature: float,
        override: bool,
        decode: Decode,
        mint: Callable[[], str],
        credit: float = 1.0,
    ) -> None:
        """Start without sessions.

        ``temperature`` is the recipe's, and ``override`` says that main turns are sampled as the recipe says
        whatever the client asks for. ``decode`` returns the text of ids, special tokens included. ``mint``
        returns a name that nobody can guess. ``credit``: factor of a main turn's share in the reward of its
        session for each main turn that follows it.
        """
        self.counters = SessionCounters()
        self._table = SessionTable(limits, self.counters)
        self._temperature = temperature
        self._override = override
        self._decode = decode
        self._mint = mint
        self._credit = credit
        self._running: dict[Id, list[RunningRequest]] = {}
        self._requests: dict[tuple[str, bytes], list[RunningRequest]] = {}
        """Requests that a retry may join, by key and digest."""
        self._due: list[Entry] = []
        """Entries that have not left yet."""

    @property
    def sessions(self) -> int:
        """Number of sessions."""
        return len(self._table)

    @property
    def size(self) -> int:
        """About how much memory all turns and messages take."""
        return self._table.size

    def begin(self, arrival: Arrival) -> RunningRequest:
        """Place a request, or return the one that runs already and that it repeats.

        Raises PromptTooLong and another ValueError for what the client did wrong, and TooManySessions.
        """
        return self.join(arrival) or self.begin_another(arrival)

    def join(self, arrival: Arrival) -> RunningRequest | None:
        """Return the running request that a retry repeats; None: it is none, or could repeat several."""
        if not arrival.retries:
            return None
        same = [
            running
            for running in self._requests.get((arrival.user.name, arrival.digest), ())
            if arrival.session in (None, running.session) and running.retries < arrival.retries
        ]
        if len(same) != 1:
            return None
        same[0].retries = arrival.retries
        self.counters.joined += 1
        return same[0]

    def begin_another(self, arrival: Arrival) -> RunningRequest:
        """Place a request that joins none. Raises what ``begin`` raises."""
        marks = marks_of(arrival.messages)
        session = self._session(arrival, marks)
        declared = arrival.user.turn_type if arrival.turn_type is None else arrival.turn_type
        verdict = judge_sampling(
            arrival.sampling, self._temperature, override=self._override and declared is TurnType.MAIN
        )
        prompt, before = self._prompt(session, arrival, marks)
        if length_of(prompt.tail) > arrival.most_tokens:
            raise PromptTooLong(length_of(prompt.tail))
        if self._table.get(session.key, session.name) is None:
            self._make_room(session.key, arrival.arrived_s)
            self._table.add(session)
        if declared is TurnType.MAIN:
            if before.answered is None and before.evicted is None and self._expect(session, arrival, marks):
                prompt = replace(prompt, reason=BranchReason.UNFINISHED)
            else:
                self._pair(session, before)
        running = self._run(session, arrival, prompt, verdict, declared)
        running.marks = marks if arrival.messages else marks_of(prompt.messages)
        running.entries = self._leave()
        return running

    def end(self, running: RunningRequest, answer: Answer) -> Sequence[Entry]:
        """Store an answer and return what is to be recorded of it. Called once for each choice."""
        if answer.choice not in running.open:
            raise ValueError(f"choice {answer.choice} has ended, or was not asked for")
        running.open.remove(answer.choice)
        session = running.home
        if not session.forgotten:
            self._due.append(self._store(running, answer))
            running.stored[answer.choice] = (running.stored[answer.choice][0], len(self._due) - 1)
        self._finish(running, answer.ended_s)
        return self._leave()

    def recorded(self, running: RunningRequest, choice: int, numbers: Sequence[int]) -> Sequence[Entry]:
        """Learn the numbers of the entries that ``end`` has returned. Return what is to be recorded next."""
        if choice not in running.stored:
            return ()
        turn, position = running.stored.pop(choice)
        turn.number = numbers[position]
        session = running.home
        if not session.forgotten:
            self._table.add_ended(session, replace(running.ended.pop(choice), number=turn.number))
        if running.named and not (session.forgotten or session.ended):
            self._table.name_answer(session, running.request, turn.number, running.previous)
        reaction = running.reactions.pop(choice, ())
        if reaction:
            self.counters.next_states += 1
            self._due.append(NextState(turn.number, as_json(reaction)))
        self._close_if_over(session)
        self._shrink()
        return self._leave()

    def sweep(self, now_s: float) -> Sequence[Entry]:
        """End the sessions that have rested for too long."""
        for session in self._table.idle(now_s):
            if not session.ended:
                self._ended(session, "idle")
            self._table.remove(session)
        return self._leave()

    def reward(self, user: User, reward: ClientReward) -> TakenReward:
        """Return the turns that a client's reward goes to, with what is to be recorded.

        Raises UnknownTurn, AmbiguousTurn and GivenBefore, and ValueError for a reward that is not finite.
        """
        return give(self._table, user, reward, self._credit)

    def open_sessions(
        self, user: User, count: int, tags: Mapping[str, object], *, is_group: bool, once: str, now_s: float
    ) -> tuple[list[str], Sequence[Entry]]:
        """Open sessions whose turns the client rewards itself. Return their names, and what to record.

        ``is_group``: their rewards are compared with each other. ``once``: name of the request; sent again,
        it opens nothing, as long as one of its sessions is there. Raises TooManySessions and GivenBefore.
        """
        named = as_json(dict(tags))
        before = self._table.opening(user.name, once) if once else ()
        for entry in before:
            if (entry.size, bool(entry.group), bytes(entry.tags)) != (count, is_group, bytes(named)):
                raise GivenBefore(f"the key {once!r} was used to open other sessions: give this one its own")
        if before:
            return [entry.session for entry in before], ()
        group = self._mint() if is_group else ""
        sessions: list[SessionState] = []
        try:
            for _ in range(count):
                self._make_room(user.name, now_s)
                session = SessionState(user.name, self._mint(), now_s)
                sessions.append(session)
                self._table.add(session)
                entry = Opened(session.name, session.key, group, count, named, once)
                self._table.opened(session, tags, entry)
                self._table.used(session, now_s)
                self._due.append(entry)
            if len(self._there(sessions)) < count:  # the last have pushed the first ones out
                raise TooManySessions(f"{count} sessions do not fit beside those of this key that run", 60.0)
        except TooManySessions:
            for session in self._there(sessions):
                self._ended(session, "evicted")
                self._table.remove(session)
            raise
        return [session.name for session in sessions], self._leave()

    def _there(self, sessions: Iterable[SessionState]) -> list[SessionState]:
        return [each for each in sessions if self._table.get(each.key, each.name) is each]

    def listed(self, user: User, name: str | None = None) -> Iterator[ListedSession]:
        """Return the sessions of a user, or the one of a name. Raises UnknownTurn at once."""
        sessions = self._table.of_key(user.name) if name is None else [self._table.known(user.name, name)]
        return (session.listed() for session in sessions)

    def end_session(self, user: User, session: str) -> Sequence[Entry]:
        """End a session without a request. Raises UnknownTurn."""
        known = self._table.known(user.name, session)
        known.ending = True
        self._close_if_over(known)
        return self._leave()

    def forget(self, session: str | None, key: str | None) -> Sequence[Entry]:
        """Drop a session, the sessions of a key, or the session of a key, running requests included."""
        if session is None and key is None:
            raise ValueError("neither a session nor a key is given; name what is to be forgotten")
        for known in self._table.matching(session, key):
            known.forgotten = True
            self._table.remove(known)
        self._due.append(Forgotten(session, key))
        return self._leave()

    def answer_of(self, user: User, request: str) -> NamedAnswer | None:
        """Return the answer to a request of this user; None: none that can be named, or not any more."""
        return self._table.answer_of(user.name, request)

    def restore(self, entries: Iterable[tuple[int, Entry]]) -> Sequence[Entry]:
        """Take numbered entries of the journal, in order, before the first request.

        All entries of every session that has not ended must be among them. Raises CorruptRecord, ValueError.
        """
        restoring = Restoring(self._table)
        for number, entry in entries:
            restoring.take(number, entry)
            self._shrink()
        return self._leave()

    def rest_from(self, now_s: float) -> None:
        """Let the rests of all sessions begin now: their times are those of another process's clock."""
        self._table.rest_from(now_s)

    def _session(self, arrival: Arrival, marks: Sequence[Mark]) -> SessionState:
        """Return the session of a request; a new one is not in the table yet."""
        key = arrival.user.name
        name = arrival.session or arrival.user.session
        if name is None:
            if (session := self._placed(arrival, marks)) is not None:
                return session
            name = arrival.client_session
        if name is None:
            name = self._mint()
            while self._table.get(key, name) is not None:
                name = self._mint()
            self.counters.minted += 1
        return self._table.get(key, name) or SessionState(key, name, arrival.arrived_s)

    def _placed(self, arrival: Arrival, marks: Sequence[Mark]) -> SessionState | None:
        """Return the session of a request that does not name it by the gateway's own means, by the ids of
        tool calls that were made there; and by its text, if the client has no name for it either.
        """
        key, table = arrival.user.name, self._table
        session = table.find_called(key, arrival.messages)
        if session is None and arrival.client_session is None:
            session = table.find(key, arrival.messages, marks)
        if session is not None:
            self.counters.by_history += 1
        return session

    def _prompt(
        self, session: SessionState, arrival: Arrival, marks: Sequence[Mark]
    ) -> tuple[PromptPlan, Predecessor]:
        if not arrival.messages:
            return prompt_of_ids(session, arrival, self._decode)
        is_asked = partial(self._table.is_asked, session.key)
        before = predecessor_of_chat(session, arrival.messages, marks, is_asked)
        return prompt_of_chat(session, arrival, marks, before, self._decode), before

    def _expect(self, session: SessionState, arrival: Arrival, marks: Sequence[Mark]) -> bool:
        """Let a request's next state wait for the running answer that it repeats, if it repeats one."""
        running = self._running.get((session.key, session.name), ())
        repeated = False
        for request in running:
            if not request.marks or request.turn_type is not TurnType.MAIN:
                continue
            same = [other for other in running if other.marks and other.marks[-1] == request.marks[-1]]
            alone = len(same) == 1 and len(request.open) == 1
            expected = expected_of(arrival.messages, marks, request.marks, alone=alone)
            if expected is not None:
                request.expected.append(expected)
                repeated = True
        return repeated

    def _pair(self, session: SessionState, before: Predecessor) -> None:
        entries, history = pair(session, before, self.counters)
        self._due += entries
        if history:
            self._table.settled(session, history)

    def _run(
        self,
        session: SessionState,
        arrival: Arrival,
        prompt: PromptPlan,
        verdict: SamplingVerdict,
        declared: TurnType,
    ) -> RunningRequest:
        """Note a request as running."""
        main = declared is TurnType.MAIN and not verdict.reasons
        running = RunningRequest(
            session=session.name,
            input_ids=ids_of(prompt.tail).tolist(),
            sampling=verdict.sampling,
            turn_type=TurnType.MAIN if main else TurnType.SIDE,
            reason=", ".join(verdict.reasons) if declared is TurnType.MAIN else arrival.side_reason,
            key=session.key,
            home=session,
            digest=arrival.digest,
            retries=arrival.retries,
            prompt=prompt,
            marks=(),
            ends_session=arrival.ends_session,
            arrived_s=arrival.arrived_s,
            request=arrival.request,
            previous=arrival.previous,
            open=set(range(arrival.choices)),
        )
        if verdict.overridden:
            self.counters.overridden += 1
        session.running += 1
        session.ended = False
        self._running.setdefault((session.key, session.name), []).append(running)
        self._requests.setdefault((session.key, arrival.digest), []).append(running)
        self._table.used(session, arrival.arrived_s)
        return running

    def _store(self, running: RunningRequest, answer: Answer) -> Turn:
        """Store an answer as a turn and return its entry."""
        session, prompt = running.home, running.prompt
        if prompt.parent is not None and prompt.parent.number is None:
            prompt = replace(prompt, parent=None, shared=0, kept=0)
        entry = entry_of(running, prompt, answer)
        size = session.size
        known = session.deepest(running.marks)
        depth = 0 if known is None else known.depth
        last = session.add_messages(known, prompt.messages[depth:], running.marks[depth:])
        turn = ChainTurn(
            node=session.add_answer(last, answer.message),
            tail=append_answer(prompt.tail, answer.tokens, answer.message, entry),
            prompt_length=length_of(prompt.tail),
            parent=prompt.parent,
            shared=prompt.shared,
            trained=entry.may_be_trained,
        )
        reason = self._count(turn, entry, prompt)
        session.add_turn(turn)
        for node in turn.endings:
            self._table.list_answer(session, node)
        self._table.account(session, size)
        self._take_reaction(running, turn, answer.choice)
        running.named = bool(answer.exchange)
        running.ended[answer.choice] = EndedTurn.of(0, entry, answer.message)
        return msgspec.structs.replace(entry, reason=reason)

    def _count(self, turn: ChainTurn, entry: Turn, prompt: PromptPlan) -> str:
        """Count a turn and return why it is a side turn or begins a branch."""
        kind = "cancelled" if entry.cancelled else entry.turn_type.name.lower()
        self.counters.turns[kind] += 1
        branch = prompt.reason
        if turn.continue_anchor():
            branch = BranchReason.FORK
        if branch is not None:
            self.counters.branches[branch.value] += 1
        for reason in filter(None, entry.reason.split(", ")):
            self.counters.side[reason] += 1
        return entry.reason or (branch.value if branch is not None else "")

    def _take_reaction(self, running: RunningRequest, turn: ChainTurn, choice: int) -> None:
        """Take the next state of an answer that came before its end."""
        reaction = fulfilled(turn, running.expected) if turn.waits else ()
        if reaction:
            running.reactions[choice] = reaction
            running.expected = [item for item in running.expected if item.reaction is not reaction]
            running.home.pair(turn)
            self._table.settled(running.home, turn.node.mark.history)
        running.stored[choice] = (turn, -1)

    def _finish(self, running: RunningRequest, now_s: float) -> None:
        """Note that a request has ended, if no answer of it is left."""
        session = running.home
        session.ending = session.ending or running.ends_session
        if not running.open and running in self._requests.get((running.key, running.digest), ()):
            _take_out(self._running, (session.key, session.name), running)
            _take_out(self._requests, (running.key, running.digest), running)
            session.running -= 1
        self._table.used(session, now_s)
        if not running.reactions:
            self._close_if_over(session)

    def _close_if_over(self, session: SessionState) -> None:
        """End a session after the last answer of a request that was said to be its last."""
        if not session.ending or session.running or session.forgotten:
            return
        self._ended(session, "client")
        self._table.end(session)

    def _ended(self, session: SessionState, why: str) -> None:
        self.counters.ended[why] += 1
        self.counters.lost += len(session.doubtful)
        self._due.append(SessionEnd(session.name, session.key, tuple(sorted(session.doubtful))))

    def _shrink(self) -> None:
        for evicted in self._table.shrink():
            self._ended(evicted, "evicted")

    def _make_room(self, key: str, now_s: float) -> None:
        evicted = self._table.make_room(key, now_s)
        if evicted is not None and not evicted.ended:
            self._ended(evicted, "evicted")

    def _leave(self) -> list[Entry]:
        due, self._due = self._due, []
        return due


def _take_out(table: dict[_Key, list[RunningRequest]], key: _Key, running: RunningRequest) -> None:
    table[key].remove(running)
    if not table[key]:
        del table[key]
