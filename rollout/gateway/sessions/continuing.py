"""The turn that a request continues, and the prompt that goes to the engine.

The predecessor of a request is, in this order,

1. the turn at the end of the longest stored history with which its messages begin, if they add no unknown
   answer, and no result of calls that they leave out;
2. the turn that has made a tool call whose id the request repeats last;
3. the turn with the answer that the request repeats last, although something before it has been rewritten;
   where the client has answered messages of its own since, the answer before those, if its turn waits;
4. the newest turn after the last known message: its answer has been rewritten;
5. none: the conversation is new.

A turn that is found by 1, 2 or 3 is answered by what follows. Otherwise, and where several turns have the
answer, the last answer of the session is, as long as nothing else runs in it: whatever a client rewrites
before, its next message is a reaction to the last answer. An answer that is rewritten itself is nobody's,
unless it is long and stands whole within other text.

The prompt is as much of the predecessor's chain as its text repeats, and then what is new. It begins a branch
where something is not repeated, or where another trained turn continues the predecessor already.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from slipstream.rollout.gateway.conversations import Arrival, ChatMessage
from slipstream.rollout.gateway.sessions.repeating import (
    asked_before,
    has_answer,
    known_answer,
    last_answer,
    repeated,
    repeats_at,
    said_since,
)
from slipstream.rollout.gateway.sessions.stored import (
    ChainTurn,
    SessionState,
    common_depth,
    messages_of,
)
from slipstream.rollout.tokens.conversation.chains import (
    Decode,
    Extended,
    Segment,
    closing_of,
    continue_ids,
    continue_text,
    repeats,
    segments_of,
)
from slipstream.rollout.tokens.conversation.sameness import (
    Mark,
    functions_of,
    ids_of_calls,
    is_answer,
    is_reminder,
    is_rewritten,
    is_step,
    reasoning_of,
    results_of,
    role_of,
    text_of,
)

CONTINUED = "This session is being continued from a previous conversation"
"""Phrase of Claude Code's before the summary of a compacted conversation. What is new follows in the same
message."""


class BranchReason(StrEnum):
    """Reason for which a turn begins a branch. The first turn of a session has none."""

    NEW = "new conversation"
    """It repeats no turn of its session."""
    CLIENT = "history rewritten"
    """The client has changed messages that it repeats."""
    THINKING = "thinking removed"
    """The template leaves out the reasoning of an earlier answer."""
    CALLS = "calls re-serialized"
    """The template writes tool calls in another way than the policy."""
    TEMPLATE = "template"
    """The template renders what is repeated in another way, for example because tools have changed."""
    FORK = "fork"
    """Another trained turn continues the same turn."""
    EVICTED = "evicted"
    """The chain that it continues has been evicted."""
    UNFINISHED = "unfinished"
    """It repeats an answer that has not ended."""


@dataclass(frozen=True, slots=True)
class Predecessor:
    """The turn before a request."""

    turn: ChainTurn | None
    reaction: Sequence[ChatMessage] = ()
    """Messages that have come after the answer of ``answered``: its next state."""
    answered: ChainTurn | None = None
    """The turn that they are a reaction to; None: they are nobody's."""
    exact: bool = False
    """The request repeats all messages of the turn."""
    evicted: bytes | None = None
    """History of a turn that the request continues, and whose chain is evicted."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompt that goes to the engine, and its origin."""

    tail: Segment | None
    parent: ChainTurn | None
    shared: int
    messages: list[ChatMessage]
    """The whole conversation, known messages as they were first sent or answered."""
    kept: int
    """Number of messages that are the parent's."""
    reason: BranchReason | None
    """Reason for which it does not repeat its parent whole; None: it does, or is the first of its session."""

    @property
    def whole(self) -> bool:
        """True if it repeats all ids of its parent."""
        return self.parent is not None and self.shared == self.parent.length


def predecessor_of_chat(
    session: SessionState,
    messages: Sequence[ChatMessage],
    marks: Sequence[Mark],
    is_asked: Callable[[ChatMessage], bool],
) -> Predecessor:
    """Return the turn that a conversation continues. ``is_asked``: see ``known_answer``."""
    last = last_answer(messages)
    called = _with_call(session, messages, last)
    for depth in range(len(marks), max(last, 0), -1):
        history = marks[depth - 1].history
        node = session.nodes.get(history)
        if node is not None and node.turns:
            if called is not None and called.waits and called not in node.turns:
                break  # the calls whose results come now are left out
            meant = _meant(node.turns, messages[depth - 1])
            turns = [turn for turn in meant if turn.waits]
            before = turns[0] if turns else meant[-1]
            return Predecessor(before, messages[depth:], before, exact=True)
        if history in session.cleared:
            return Predecessor(None, messages[depth:], evicted=history)
    if called is not None:
        return Predecessor(called, _said_to_calls(messages, called), called)
    return _rewritten(session, messages, marks, last, is_asked)


def _rewritten(
    session: SessionState,
    messages: Sequence[ChatMessage],
    marks: Sequence[Mark],
    last: int,
    is_asked: Callable[[ChatMessage], bool],
) -> Predecessor:
    """Return the turn that a conversation continues in which something was rewritten.

    ``last``: place of its last answer; below 0: it has none.
    """
    reaction = messages[last + 1 :]
    if last < 0:
        turns, new = _last_answered(session), _last_of_user(messages)
        is_reaction = len(turns) == 1 and new and _goes_on(session, turns[0], messages, new[0])
        return Predecessor(None, new, turns[0]) if is_reaction else Predecessor(None)
    turn, equals = _with_answer(session, messages, marks, last)
    if equals == 1:
        return Predecessor(turn, reaction, turn)
    place = last
    if not equals:
        # aider says which files there are, and "Ok." to that, between each answer and the next question
        known = known_answer(messages, last, lambda place: marks[place].alone in session.answers, is_asked)
        place = last if known < 0 else known
        own = None if place == last else _answered_at(session, messages, marks, place)
        if own is not None:
            return Predecessor(own, said_since(messages, place), own if own.waits else None)
    said = said_since(messages, place)
    turns = _meant_last(session, messages, marks, place, said)
    return Predecessor(turn or _behind_known(session, marks), said, turns[-1] if turns else None)


def _meant_last(
    session: SessionState,
    messages: Sequence[ChatMessage],
    marks: Sequence[Mark],
    place: int,
    said: Sequence[ChatMessage],
) -> Sequence[ChainTurn]:
    """Return the last answers of a session that a conversation may have in a place. Where several turns have
    the answer, it may be another one's: ``said``, what is said to it, must not ask its question again, and no
    other turn may wait if its question is not repeated."""
    turns = _alike(_last_answered(session), messages[place], marks[place])
    alike = _alike(session.newest(), messages[place], marks[place])
    if len(alike) > 1:
        waiting = {turn.node.before.mark.history for turn in alike if turn.waits and turn.node.before}
        turns = [
            turn
            for turn in turns
            if not _is_asked_again(turn, said)
            and (len(waiting) == 1 or repeats_at(turn, messages, marks, place))
        ]
    return [turn for turn in turns if has_answer(turn, marks[place])] or turns


def _is_asked_again(turn: ChainTurn, said: Sequence[ChatMessage]) -> bool:
    """True if what is said holds the message that a turn has answered."""
    return any(is_rewritten(asked, message) for asked in asked_before(turn.node) for message in said)


def _said_to_calls(messages: Sequence[ChatMessage], turn: ChainTurn) -> Sequence[ChatMessage]:
    """Return what has been said to the answer with a turn's calls; without it, from their results on."""
    ids = set(ids_of_calls(turn.message)) - {None, ""}
    for place in range(len(messages) - 1, -1, -1):
        if not ids.isdisjoint(ids_of_calls(messages[place])):
            return said_since(messages, place)
    place = next(place for place, message in enumerate(messages) if results_of(message) in ids)
    return said_since(messages, place - 1)


def _answered_at(
    session: SessionState, messages: Sequence[ChatMessage], marks: Sequence[Mark], place: int
) -> ChainTurn | None:
    """Return the turn whose answer a conversation has in a place; None: none, or several may be."""
    if place < 0:
        return None
    if (turn := _with_call(session, messages, place)) is not None:
        return turn
    turn, equals = _with_answer(session, messages, marks, place)
    return turn if equals == 1 else None


def _with_call(session: SessionState, messages: Sequence[ChatMessage], last: int) -> ChainTurn | None:
    """Return the turn with the tool calls that are repeated last, or whose results follow, by their ids."""
    ids = {id_ for message in messages[max(last, 0) :] if (id_ := results_of(message)) is not None}
    if last >= 0:
        ids |= {id_ for id_ in ids_of_calls(messages[last]) if isinstance(id_, str) and id_}
    if not ids:
        return None
    found = [turn for turn in session.newest() if not ids.isdisjoint(ids_of_calls(turn.message))]
    if len(found) != 1 or (last >= 0 and not _may_make(found[0].message, messages[last])):
        return None
    return found[0]


def _may_make(answer: Mapping[str, object], repeated: ChatMessage) -> bool:
    """True unless a repeated answer has other calls than one with the same ids: not all dialects make up ids
    that differ."""
    return not is_step(repeated) or functions_of(answer) == functions_of(repeated)


def _last_answered(session: SessionState) -> Sequence[ChainTurn]:
    """Return the last turn that may be trained, with the other answers to its request, as far as they wait
    for their next states; empty: others run, or none waits."""
    newest = [turn for turn in session.newest() if turn.trained]
    if session.running or not newest:
        return ()
    return [turn for turn in newest if turn.waits and turn.node.before is newest[0].node.before]


def _last_of_user(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Return the user's last message, with the reminders after it; empty: another one than the system's
    follows, or there is none."""
    spoken = [message for message in messages if role_of(message) not in ("system", "assistant")]
    last = max((place for place, message in enumerate(spoken) if not is_reminder(message)), default=0)
    return spoken[last:] if spoken and role_of(spoken[last]) == "user" else ()


def _goes_on(
    session: SessionState, turn: ChainTurn, messages: Sequence[ChatMessage], new: ChatMessage
) -> bool:
    """True if a conversation without any answer goes on after a turn, rather than beginning beside it.

    It then has something that stands for what was left out, before what is new. An answer with calls goes on
    with their results, and another agent has another system message: of one session's agents, the first goes
    on, since others may begin alike one after the other. A request may also ask again what the turn has
    answered.
    """
    users = [message for message in messages if role_of(message) == "user" and not is_reminder(message)]
    if ids_of_calls(turn.message) or (len(users) < 2 and CONTINUED not in str(text_of(new))):
        return False
    if _is_asked_again(turn, [new]):
        return False
    first = next((other for other in session.turns if other.trained), turn)
    return all(_is_same_agent(messages_of(known.node), messages) for known in (first, turn))


def _is_same_agent(one: Sequence[ChatMessage], other: Sequence[ChatMessage]) -> bool:
    """True if two conversations begin with the same message of the system, or with none."""
    systems = [next((m for m in each if role_of(m) == "system"), None) for each in (one, other)]
    if systems[0] is None or systems[1] is None:
        return systems[0] is systems[1]
    return systems[0] == systems[1] or is_rewritten(systems[0], systems[1])


def _meant(turns: Sequence[ChainTurn], answer: ChatMessage) -> Sequence[ChainTurn]:
    """Return the turns, of those with equal answers, that a client means: with the ids of calls and with the
    reasoning that it repeats, if any has them."""
    for tell in (ids_of_calls, reasoning_of):
        told = tell(answer)
        turns = [turn for turn in turns if told and tell(turn.message) == told] or turns
    return turns


def _with_answer(
    session: SessionState, messages: Sequence[ChatMessage], marks: Sequence[Mark], last: int
) -> tuple[ChainTurn | None, int]:
    """Return the turn with the answer that is repeated last, and how many turns have it. Equal answers to one
    request count once, as the oldest that waits.

    The message before the answer must be repeated, too, if only rewritten: short answers are often the same.
    """
    best: ChainTurn | None = None
    most, equals = (0, False), 0
    for turn in _alike(session.newest(), messages[last], marks[last]):
        common = repeated(turn, messages, marks, last)
        rank = (common, has_answer(turn, marks[last]))
        if common > 1 and rank > most:
            best, most, equals = turn, rank, 1
        elif best is not None and rank == most:
            equals += turn.node is not best.node
            best = turn if turn.node is best.node and turn.waits else best
    return best, equals


def _alike(turns: Sequence[ChainTurn], answer: ChatMessage, mark: Mark) -> Sequence[ChainTurn]:
    """Return the turns with an answer; if none has it as it is, or if it has calls, also those with what is
    written around it, or is left out beside its calls."""
    exact = [turn for turn in turns if has_answer(turn, mark)]
    if exact and not is_step(answer):
        return exact
    return [
        turn
        for turn in turns
        if has_answer(turn, mark) or any(is_answer(node.message, answer) for node in turn.endings)
    ]


def _behind_known(session: SessionState, marks: Sequence[Mark]) -> ChainTurn | None:
    """Return the newest turn after the last known message."""
    known = session.deepest(marks)
    if known is None:
        return None
    for turn in session.newest():
        if common_depth(turn.node, marks) == known.depth:
            return turn
    return None


def prompt_of_chat(
    session: SessionState, arrival: Arrival, marks: Sequence[Mark], before: Predecessor, decode: Decode
) -> PromptPlan:
    """Return the prompt of a conversation that continues ``before``."""
    turn = before.turn
    messages = _as_answered(session.canonical(arrival.messages, marks), marks, turn)
    extended = _extended_chat(None if turn is None else turn.tail, arrival, messages, decode)
    if turn is None:
        reason = BranchReason.EVICTED if before.evicted else BranchReason.NEW if session.turns else None
        return PromptPlan(extended.tail, None, 0, messages, 0, reason)
    reason = None
    if extended.shared < turn.length:
        reason = _why(turn, extended.differs) if before.exact else BranchReason.CLIENT
    return PromptPlan(extended.tail, turn, extended.shared, messages, common_depth(turn.node, marks), reason)


def _as_answered(
    messages: list[ChatMessage], marks: Sequence[Mark], turn: ChainTurn | None
) -> list[ChatMessage]:
    """Return messages, with the answers of the turns on the way to ``turn`` in place of equal ones."""
    placed: set[int] = set()
    while turn is not None:
        place = turn.node.depth - 1
        is_repeated = place < len(marks) and marks[place].history == turn.node.mark.history
        if is_repeated and place not in placed:
            messages[place] = dict(turn.message)
            placed.add(place)
        turn = turn.parent
    return messages


def _extended_chat(
    tail: Segment | None, arrival: Arrival, messages: Sequence[ChatMessage], decode: Decode
) -> Extended:
    if arrival.template is None or arrival.text is None:
        return continue_ids(tail, _ids_of(arrival))
    template = arrival.template
    if messages == list(arrival.messages):
        if tail is None:
            return _anew(_ids_of(arrival), arrival.text)
        text = arrival.text
    else:
        text = template.render(messages, answer=True)
    return continue_text(
        tail, text, template.encode, decode, closing_of(partial(template.render, answer=False))
    )


def _ids_of(arrival: Arrival) -> Sequence[int]:
    """Return the ids of the whole prompt, tokenized anew."""
    if arrival.prompt_ids is not None:
        return arrival.prompt_ids
    if arrival.template is None or arrival.text is None:
        raise ValueError("a prompt has neither ids nor a text that its template could encode")
    return arrival.template.encode(arrival.text)


def _anew(ids: Sequence[int], text: str | None) -> Extended:
    extended = continue_ids(None, ids)
    if extended.tail is not None:
        extended.tail.text = text
    return extended


def _why(turn: ChainTurn, differs: Segment | None) -> BranchReason:
    """Return why the template does not repeat the chain of a turn whole, although its messages are."""
    answer = differs
    if differs is not None and differs.answer is None and _opens_thinking(differs):
        answer = next((later for later in segments_of(turn.tail) if later.start >= differs.length), None)
    if answer is not None and answer.answer is not None:
        if answer.answer.get("reasoning_content"):
            return BranchReason.THINKING
        if answer.answer.get("tool_calls"):
            return BranchReason.CALLS
    return BranchReason.TEMPLATE


def _opens_thinking(context: Segment) -> bool:
    """True if a prompt ends with the beginning of a reasoning, such as ``<think>``."""
    return context.text is not None and context.text.rstrip().endswith("think>")


def prompt_of_ids(session: SessionState, arrival: Arrival, decode: Decode) -> tuple[PromptPlan, Predecessor]:
    """Return the prompt of a request that has sent text or ids, and the turn that it continues.

    Its messages are what a judge reads: one message of a user for what each request has added.
    """
    turn, extended = _longest(session, arrival, decode)
    whole = turn is not None and extended.shared == turn.length
    added = _ids_of(arrival) if turn is None or not whole else _behind(extended, turn)
    message: ChatMessage = {"role": "user", "content": decode(list(added))}
    if turn is None:
        reason = BranchReason.NEW if session.turns else None
        return PromptPlan(extended.tail, None, 0, [message], 0, reason), Predecessor(None)
    if not whole:
        prompt = PromptPlan(extended.tail, turn, extended.shared, [message], 0, BranchReason.CLIENT)
        return prompt, Predecessor(turn)
    messages = messages_of(turn.node)
    prompt = PromptPlan(extended.tail, turn, extended.shared, [*messages, message], len(messages), None)
    return prompt, Predecessor(turn, [message] if added else (), turn)


def _behind(extended: Extended, turn: ChainTurn) -> Sequence[int]:
    """Return the ids that a prompt adds to the chain of its predecessor."""
    if extended.tail is None:
        return ()
    return extended.tail.ids[turn.length - extended.tail.start :].tolist()


def _longest(session: SessionState, arrival: Arrival, decode: Decode) -> tuple[ChainTurn | None, Extended]:
    """Return the newest turn whose chain the prompt repeats; else the newest turn of all, if the prompt
    repeats its prompt."""
    turns = session.newest()
    text = None if arrival.template is None else arrival.text
    ids = () if text is not None else _ids_of(arrival)
    for turn in turns:
        if repeats(turn.tail, ids, text, decode):
            return turn, _extended(turn.tail, arrival, decode)
    if turns:
        extended = _extended(turns[0].tail, arrival, decode)
        if extended.shared >= turns[0].prompt_length:
            return turns[0], extended
    return None, _extended(None, arrival, decode)


def _extended(tail: Segment | None, arrival: Arrival, decode: Decode) -> Extended:
    if arrival.text is None or arrival.template is None:
        return continue_ids(tail, _ids_of(arrival))
    if tail is None:
        return _anew(_ids_of(arrival), arrival.text)
    return continue_text(tail, arrival.text, arrival.template.encode, decode)
