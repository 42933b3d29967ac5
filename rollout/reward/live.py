"""Judges of live turns: a turn gets a score from what came next. A recipe names a judge as ``judge.code``."""

import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec

from slipstream.rollout.tokens.teacher import TeacherScores
from slipstream.rollout.tokens.trajectory import Messages


class JudgedTurn(msgspec.Struct, array_like=True, frozen=True):
    """A turn of a live user, as a judge gets it."""

    session: str
    key: str
    """Name of the API key."""
    history: Messages
    """The conversation before, answers included, as the request repeats it."""
    messages: Messages
    """The messages of the request after ``history``."""
    answer: dict[str, Any]
    """The message that was answered."""
    finish: str
    """``stop`` or ``length``."""
    tokens: int
    """Number of sampled tokens."""
    left_out: int = 0
    """Number of earlier messages that ``history`` leaves out: it has at most a mebibyte, and no damaged
    message."""
    prompt_ids: bytes = b""
    """Token ids of the prompt as it was sampled from, int32. Empty unless a teacher scores the answer."""
    answer_ids: bytes = b""
    """The sampled token ids, int32. Empty unless a teacher scores the answer."""

    @property
    def conversation(self) -> Messages:
        """All messages up to the answer, the answer included."""
        return [*self.history, *self.messages, self.answer]

    @property
    def text(self) -> str:
        """The text of the answer."""
        return text_of(self.answer)


class VoteCounts(msgspec.Struct, array_like=True, frozen=True):
    """Counts of the votes on a turn that have not contributed to a verdict."""

    tied: int = 0
    """Number of questions on which two answers have led."""
    unparsable: int = 0
    """Number of votes in which nothing could be read."""
    missing: int = 0
    """Number of votes that have not come: the request for them has failed."""

    def __add__(self, other: "VoteCounts") -> "VoteCounts":
        return VoteCounts(
            self.tied + other.tied, self.unparsable + other.unparsable, self.missing + other.missing
        )


NO_VOTES = VoteCounts()


@dataclass(frozen=True)
class Verdict:
    """The judgement of a turn."""

    score: float | None
    """Any finite number. None: the turn has no score. Without scores of a teacher it then goes on waiting."""
    hint: str | None = None
    """Advice that would have made the answer better. It is stored with the turn."""
    teacher: TeacherScores | None = None
    """A teacher's scores of the turn's sampled tokens, each of which has a log-prob; None: there are none. A
    turn with these scores alone is trained on them alone."""
    votes: VoteCounts = NO_VOTES
    """For metrics."""
    nothing_to_learn: bool = False
    """True if nothing about the turn can be trained, and no later question changes that: it has neither a
    score nor a hint. It then ends without having been trained."""


class LiveJudge(Protocol):
    """Judges turns of live users. Any class with this method is one; it need not inherit from ``LiveJudge``.

        class Thanked:
            async def judge(self, turn: JudgedTurn, next_state: Messages) -> Verdict:
                said = " ".join(text_of(message) for message in next_state)
                return Verdict(1.0 if "thanks" in said.lower() else None)

    A recipe names the class and gives its arguments, or names a function with the parameters of ``judge``:

        judge: {type: code, code: {path: my_package.judges.Thanked, args: {}}}

    Judges run in processes of their own (``live.judging``), as rewards do: ``slipstream.rollout.reward``
    says what they may do there.
    """

    def judge(self, turn: JudgedTurn, next_state: Messages) -> Verdict | Awaitable[Verdict]:
        """Return the verdict on a turn.

        ``next_state``: the messages of users, tools and environments that came after the turn; empty if the
        session has ended. Raise an exception when the turn cannot be judged, for example because a server is
        down. After an exception or a score of None the judge is asked about the turn again later; neither
        counts as a score of 0.
        """
        ...


POSITIVE = r"\b(thanks?|thank you|perfect|great|exactly|that works|it works|correct|well done)\b"
NEGATIVE = (
    r"\b(wrong|incorrect|not what i|doesn'?t work|does not work|didn'?t work|that'?s not|try again|"
    r"error|exception|traceback|failed)\b"
)


class RuleJudge:
    """Looks for words of praise and of complaint in what came next, tool output included."""

    def __init__(
        self, positive: str = POSITIVE, negative: str = NEGATIVE, otherwise: float | None = None
    ) -> None:
        """``positive``, ``negative``: regular expressions, found in any case. ``otherwise``: score of a turn
        after which neither is found, or both; None: there is no verdict.
        """
        self._positive = re.compile(positive, re.IGNORECASE)
        self._negative = re.compile(negative, re.IGNORECASE)
        self._otherwise = otherwise

    async def judge(self, turn: JudgedTurn, next_state: Messages) -> Verdict:
        """Return 1 for praise and -1 for a complaint."""
        said = "\n".join(map(text_of, next_state))
        praise, complaint = self._positive.search(said), self._negative.search(said)
        if (praise is None) == (complaint is None):
            return Verdict(self._otherwise)
        return Verdict(1.0) if praise else Verdict(-1.0)


def text_of(message: Mapping[str, object]) -> str:
    """Return the text of a message, whose content is a text, or a list of parts."""
    content: object = message.get("content")
    if isinstance(content, str):
        return content
    parts = cast("list[object]", content) if isinstance(content, list) else []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, dict):
            text = cast("dict[object, object]", part).get("text")
            if isinstance(text, str):
                texts.append(text)
    return "\n".join(texts)
