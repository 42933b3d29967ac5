"""Turns and histories of one session.

    messages    u1 ─ a1 ─ u2 ─ a2          each a MessageNode; equal beginnings are the same nodes
                       └─ u3 ─ a3
    turns       t1 ends at a1, t2 at a2, t3 at a3

A history is looked up by the digest of all its messages, so that it costs the same wherever it ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.rollout.gateway.conversations import (
    ChatMessage,
    ListedSession,
    ListedTurn,
    NamedAnswer,
    TakenReward,
)
from slipstream.rollout.tokens.conversation.chains import Segment, append, length_of, size_of
from slipstream.rollout.tokens.conversation.sameness import Mark, ids_of_calls, marks_of, role_of
from slipstream.rollout.tokens.turn_entries import HeldReward, Turn

_TURN_BYTES = 1000
_MESSAGE_BYTES = 600
"""Memory of a turn, with the digests by which it is found, and of a message, beside ids and text."""
_NAMED_BYTES = 400
"""Memory of an answer that can be named."""
_SEARCHED = 64
"""Turns that are looked at, the newest first, where no digest leads to the turn."""


@dataclass(slots=True, eq=False)
class MessageNode:
    """A message, and all messages before it."""

    before: "MessageNode | None"
    message: ChatMessage
    """As it was first sent, or as it was answered: what the template is given when a client repeats it."""
    mark: Mark
    depth: int
    """Number of messages up to this one."""
    turns: "list[ChainTurn]" = field(default_factory=list["ChainTurn"])
    """Turns whose answer this is."""


@dataclass(slots=True, eq=False)
class ChainTurn:
    """A turn that has ended."""

    node: MessageNode
    """Its answer."""
    tail: Segment | None
    """Its chain, answer included."""
    prompt_length: int
    parent: "ChainTurn | None"
    shared: int
    trained: bool
    """A main turn that was not cancelled."""
    number: int | None = None
    """Number of its entry; None until the journal has given it one."""
    continued: bool = False
    """A trained turn has it as its anchor and continues its branch."""
    paired: bool = False
    """Its next state is recorded."""

    endings: Sequence[MessageNode] = ()
    """Its answer; and, if the client had given its beginning, both as the one message that clients may
    repeat. Empty until its session stores it."""
    anchor: "ChainTurn | None" = None
    """The nearest trained turn whose chain this one repeats whole, through turns that are not trained."""

    @property
    def length(self) -> int:
        """Number of ids of its chain."""
        return length_of(self.tail)

    @property
    def message(self) -> Mapping[str, object]:
        """Its own answer: that of another turn may have the same node, and differ in its reasoning."""
        own = None if self.tail is None else self.tail.answer
        return self.node.message if own is None else own

    @property
    def waits(self) -> bool:
        """True if a next state may still come and matter."""
        return self.trained and not self.paired

    def continue_anchor(self) -> bool:
        """Find the turn whose branch this one continues; return True if another turn continues it already."""
        parent = self.parent
        if parent is not None and self.shared == parent.length:
            self.anchor = parent if parent.trained else parent.anchor
        if self.anchor is None or not self.trained:
            return False
        forks, self.anchor.continued = self.anchor.continued, True
        return forks


@dataclass(slots=True, eq=False)
class EndedTurn:
    """What rewards need of a turn. It stays when the turn itself is evicted."""

    number: int
    """Number of its entry."""
    request: str
    """Id of the request that it has answered."""
    choice: int
    is_main: bool
    """A main turn that was not cancelled."""
    calls: tuple[str, ...]
    """Ids of the tool calls in its answer."""
    versions: tuple[int, ...]
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    """Rewards of clients, by name."""

    @classmethod
    def of(cls, number: int, entry: Turn, answer: Mapping[str, object]) -> "EndedTurn":
        """Return what is kept of the turn of an entry."""
        calls = tuple(id_ for id_ in ids_of_calls(answer) if isinstance(id_, str) and id_)
        versions = tuple(dict.fromkeys(version for version, _ in entry.spans))
        return cls(number, entry.response, entry.choice, entry.may_be_trained, calls, versions)

    @property
    def ids(self) -> tuple[str, ...]:
        """All ids by which a client may name it."""
        return (self.request, *self.calls) if self.request else self.calls


@dataclass(slots=True, eq=False)
class SessionGroup:
    """Sessions of one task, whose rewards are compared with each other once each has one."""

    name: str
    size: int
    sessions: "list[SessionState]" = field(default_factory=list["SessionState"])
    is_over: bool = False
    """Every session has its reward, or one of them is gone."""


@dataclass(slots=True, eq=False)
class SessionState:
    """The stored part of a session. ``clear`` leaves what rewards and next states need."""

    key: str
    name: str
    used_s: float
    """When the last request came or the last answer ended, by the process's steady clock."""
    nodes: dict[bytes, MessageNode] = field(default_factory=dict[bytes, MessageNode])
    """Messages by the digest of their history."""
    turns: list[ChainTurn] = field(default_factory=list[ChainTurn])
    """In the order in which they ended."""
    answers: "dict[bytes, Mapping[str, object] | None]" = field(
        default_factory=dict[bytes, "Mapping[str, object] | None"]
    )
    """Answers with the reasoning that clients leave out, by their digests; None: several differ in it."""
    ended_turns: list[EndedTurn] = field(default_factory=list[EndedTurn])
    """All its turns, in the order of their entries."""
    tags: Mapping[str, object] | None = None
    """What the client that has opened it calls it, and rewards it; None: nobody has opened it."""
    once: str = ""
    """Name that the client has given the request that has opened it; empty: none."""
    group: "SessionGroup | None" = None
    held: HeldReward | None = None
    """Its reward, which waits for those of its group."""
    given: dict[str, TakenReward] = field(default_factory=dict[str, TakenReward])
    """Rewards whose givings have a name, by that name."""
    cleared: dict[bytes, list[int]] = field(default_factory=dict[bytes, list[int]])
    """Numbers of turns that waited for a next state when it was cleared, by the digest of their history."""
    histories: list[bytes] = field(default_factory=list[bytes])
    """Digests under which the histories of all sessions have this one."""
    answered: list[bytes] = field(default_factory=list[bytes])
    """Digests of answers, alone and with the message before, under which all sessions have this one."""
    named: dict[str, NamedAnswer] = field(default_factory=dict[str, NamedAnswer])
    """Answers that later requests can name, by the ids of their requests."""
    running: int = 0
    """Requests that have not ended."""
    ending: bool = False
    """No further request follows: it ends when the last running one does."""
    ended: bool = False
    """It has ended, and rewards may still come."""
    forgotten: bool = False
    size: int = 0
    """About how much memory its turns and messages take."""
    waiting: int = 0
    """Turns that wait for a next state."""
    doubtful: set[int] = field(default_factory=set[int])
    """Numbers of those that may have lost theirs: a request has come since whose next state is nobody's."""

    def listed(self) -> ListedSession:
        """Return what a list of sessions shows."""
        turns = [
            ListedTurn(
                place, turn.request, turn.choice, turn.is_main, turn.versions, turn.calls, dict(turn.rewards)
            )
            for place, turn in enumerate(self.ended_turns)
        ]
        group = "" if self.group is None else self.group.name
        return ListedSession(self.name, self.tags or {}, group, self.ended, turns)

    def deepest(self, marks: Sequence[Mark]) -> MessageNode | None:
        """Return the last message up to which a conversation is known."""
        for mark in reversed(marks):
            node = self.nodes.get(mark.history)
            if node is not None:
                return node
        return None

    def canonical(self, messages: Sequence[ChatMessage], marks: Sequence[Mark]) -> list[ChatMessage]:
        """Return messages, each known one as it was first sent or answered."""
        known = messages_of(self.deepest(marks))
        unknown = zip(messages[len(known) :], marks[len(known) :], strict=True)
        return known + [
            message if message.get("reasoning_content") else dict(self.answers.get(mark.alone) or message)
            for message, mark in unknown
        ]

    def newest(self) -> list[ChainTurn]:
        """Return the newest turns, the newest first."""
        return self.turns[: -_SEARCHED - 1 : -1]

    def add_messages(
        self, before: MessageNode | None, messages: Sequence[ChatMessage], marks: Sequence[Mark]
    ) -> MessageNode | None:
        """Store messages that follow ``before`` and return the last one."""
        for message, mark in zip(messages, marks, strict=True):
            node = self.nodes.get(mark.history)
            if node is None:
                node = MessageNode(before, message, mark, 1 if before is None else before.depth + 1)
                self.nodes[mark.history] = node
                self.size += _MESSAGE_BYTES + _text_bytes(message)
            before = node
        return before

    def add_answer(self, before: MessageNode | None, message: ChatMessage) -> MessageNode:
        """Store an answer that follows ``before``."""
        marks = marks_of([message], b"" if before is None else before.mark.history)
        node = self.add_messages(before, [message], marks)
        assert node is not None
        return node

    def add_turn(self, turn: ChainTurn) -> None:
        """Store a turn whose messages are stored."""
        self.turns.append(turn)
        turn.endings = self._endings(turn.node)
        for node in turn.endings:
            node.turns.append(turn)
            self._keep_reasoning(node.mark.alone, turn.message if node is turn.node else node.message)
        self.waiting += turn.waits
        self.size += _TURN_BYTES
        for segment in (turn.tail, None if turn.tail is None else turn.tail.before):
            self.size += 0 if segment is None else size_of(segment)

    def _keep_reasoning(self, alone: bytes, answer: Mapping[str, object]) -> None:
        known = self.answers.setdefault(alone, answer)
        if known is not None and known.get("reasoning_content") != answer.get("reasoning_content"):
            self.answers[alone] = None

    def _endings(self, answer: MessageNode) -> list[MessageNode]:
        """Return an answer; and, if the client had given its beginning, both as the one message that clients
        may repeat."""
        merged = _merged(answer)
        if merged is None or answer.before is None:
            return [answer]
        return [answer, self.add_answer(answer.before.before, merged)]

    def name_answer(self, request: str, turn: int, previous: str) -> None:
        """Note that later requests can name the answer to a request."""
        self.named[request] = NamedAnswer(self.name, turn, previous)
        self.size += _NAMED_BYTES

    def pair(self, turn: ChainTurn) -> None:
        """Note that the next state of a turn is recorded."""
        self.waiting -= turn.waits
        turn.paired = True
        self.doubtful.discard(turn.number or 0)

    def doubt(self) -> None:
        """Note that a next state is nobody's, so that each turn which waits now may have lost its own."""
        self.doubtful.update(turn.number for turn in self.turns if turn.waits and turn.number is not None)

    def pair_cleared(self, history: bytes) -> int | None:
        """Return a turn that waited at the end of a history when the session was cleared, and pair it."""
        number = self.cleared.get(history, [None])[0]
        if number is not None:
            self._pair_cleared(number)
        return number

    def pair_number(self, number: int) -> list[bytes]:
        """Pair the turn with this number, and return the histories that end with it."""
        turn = self.turn(number)
        if turn is None:
            return self._pair_cleared(number)
        self.pair(turn)
        return [turn.node.mark.history]

    def turn(self, number: int) -> ChainTurn | None:
        """Return the turn whose entry has this number; None: it is not stored."""
        for turn in reversed(self.turns):
            if turn.number is not None and turn.number <= number:
                return turn if turn.number == number else None
        return None

    def _pair_cleared(self, number: int) -> list[bytes]:
        histories = [history for history, waiting in self.cleared.items() if number in waiting]
        for history in histories:
            self.cleared[history].remove(number)
            if not self.cleared[history]:
                del self.cleared[history]
        self.waiting -= bool(histories)
        self.doubtful.discard(number)
        return histories

    def clear(self) -> None:
        """Drop turns and messages. Turns that wait for a next state can still be paired, by digest."""
        for node in self.nodes.values():
            numbers = [turn.number for turn in node.turns if turn.waits and turn.number is not None]
            if numbers:
                self.cleared.setdefault(node.mark.history, []).extend(numbers)
        self.nodes.clear()
        self.turns.clear()
        self.answers.clear()
        self.size = 0


def append_answer(
    prompt: Segment | None, tokens: Sequence[int], message: Mapping[str, object], entry: Turn
) -> Segment:
    """Return the chain of a turn: its prompt, then its answer. Without spans the answer is context."""
    if not entry.spans:
        return append(prompt, tokens, None)
    return append(prompt, tokens, None, message, entry.finish)


def messages_of(node: MessageNode | None) -> list[ChatMessage]:
    """Return a message and all messages before it, the first one first."""
    messages: list[ChatMessage] = []
    while node is not None:
        messages.append(node.message)
        node = node.before
    messages.reverse()
    return messages


def common_depth(node: MessageNode | None, marks: Sequence[Mark]) -> int:
    """Return how many messages a stored history and a conversation have in common, from the beginning."""
    while node is not None:
        if node.depth <= len(marks) and marks[node.depth - 1].history == node.mark.history:
            return node.depth
        node = node.before
    return 0


def ancestor(node: MessageNode, depth: int) -> MessageNode | None:
    """Return the message with the number ``depth`` on the way to ``node``; None for 0."""
    step: MessageNode | None = node
    while step is not None and step.depth > depth:
        step = step.before
    return step


def _merged(answer: MessageNode) -> ChatMessage | None:
    """Return an answer joined to the beginning that the client gave for it; None: it gave none."""
    given = answer.before
    if given is None or role_of(given.message) != "assistant" or role_of(answer.message) != "assistant":
        return None
    beginning, rest = given.message.get("content"), answer.message.get("content")
    if not isinstance(beginning, str) or not isinstance(rest, str):
        return None
    return {**answer.message, "content": beginning + rest}


def _text_bytes(message: Mapping[str, object]) -> int:
    """Return about how many bytes the text of a message takes."""
    return len(repr(message.get("content"))) + len(repr(message.get("tool_calls")))
