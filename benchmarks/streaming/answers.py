"""What users have read, compared with what the gateway has recorded: nothing lost, nothing twice. Pure.

heard       an answer as its client has put it together, part by part
recorded    the turn of the journal: the engine's own ids, log-probs and versions
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from slipstream.rollout.tokens.record import decode_chunks
from slipstream.rollout.tokens.turn_entries import Turn

TIE = 1e-4
"""Greedy answers may differ where two tokens are equally likely up to rounding: engines add up in an order
that depends on what else they compute."""

Span = tuple[int, int]
"""(version, tokens)."""


@dataclass
class Heard:
    """An answer as a user has got it."""

    session: str
    limit: int
    """Largest number of tokens that was asked for."""
    greedy: bool = False
    is_unnamed: bool = False
    """The request has not named its session."""
    stops: Sequence[str] = ()
    text: str = ""
    finish: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ids: list[int] | None = None
    """None: the protocol has none, and so neither of the next two."""
    logprobs: list[float] | None = None
    spans: list[Span] | None = None
    repeats: tuple[list[int], list[float]] | None = None
    """Ids and log-probs of another greedy answer, which this one must be the same as."""
    error: str | None = None
    first_s: float = 0.0
    """Time to the first part."""
    pause_s: float = 0.0
    """Longest time between two parts."""


class Recorded(NamedTuple):
    """A turn of the journal, and its tokens."""

    turn: Turn
    context: list[int]
    ids: list[int]
    logprobs: list[float]

    @classmethod
    def read(cls, turn: Turn, chunk: bytes) -> "Recorded":
        [part] = decode_chunks(chunk)
        return cls(turn, part.context.tolist(), part.tokens.tolist(), part.logprobs.tolist())


@dataclass
class Account:
    """What became of all answers of a run."""

    answers: int = 0
    failed: int = 0
    """Answers with an error, or that nobody has recorded."""
    truncated: int = 0
    """Answers without an end, or with less than was recorded."""
    duplicated: int = 0
    """Answers with more than was recorded, or that were recorded twice."""
    altered: int = 0
    """Answers with something else than was recorded."""
    ends_wrong: int = 0
    """Answers whose reason of the end, or number of tokens, is not that of their ids."""
    spans_wrong: int = 0
    """Answers in which a token has no version, or an older one than the token before."""
    repeats: int = 0
    """Greedy answers that were compared with another one to the same ids."""
    repeats_wrong: int = 0
    ties: int = 0
    """Greedy answers that differ from another one where two tokens are equally likely."""
    tokens: int = 0
    crossing: int = 0
    """Answers with tokens of several versions."""
    versions: set[int] = field(default_factory=set[int])
    firsts_s: list[float] = field(default_factory=list[float])
    """Time to the first part of each answer."""
    pauses_s: list[float] = field(default_factory=list[float])
    """Longest time between two parts of each answer."""
    examples: list[str] = field(default_factory=list[str])
    """Some of what is wrong, in words."""

    @property
    def is_clean(self) -> bool:
        wrong = (self.failed, self.truncated, self.duplicated, self.altered, self.ends_wrong)
        return not any((*wrong, self.spans_wrong, self.repeats_wrong))

    def note(self, text: str) -> None:
        if len(self.examples) < 10:
            self.examples.append(text)


@dataclass(frozen=True)
class Reading:
    """How ids are read."""

    decode: Callable[[Sequence[int]], str]
    """Returns the text of ids without special tokens."""
    end: int
    """The token that ends an answer."""

    def text(self, ids: Sequence[int], stops: Iterable[str]) -> str:
        """Return what a user is to read: all up to the first stop string."""
        text = self.decode([token for token in ids if token != self.end])
        return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)]

    def finish(self, heard: Heard, ids: Sequence[int]) -> str:
        """Return why an answer of these ids has ended."""
        text = self.decode(ids)
        is_stopped = ids[-1:] == [self.end] or any(stop in text for stop in heard.stops)
        if is_stopped or len(ids) == heard.limit:
            return "stop" if is_stopped else "length"
        return "nothing"


def account_of(
    heard: Iterable[Heard], recorded: Mapping[str, Sequence[Recorded]], reading: Reading
) -> Account:
    """Compare answers with the turns of their sessions, both in order."""
    sums = Account()
    by_session: dict[str, list[Heard]] = defaultdict(list)
    for answer in heard:
        by_session[answer.session].append(answer)
    for session, answers in by_session.items():
        turns = recorded.get(session, ())
        if len(turns) > len(answers):
            sums.duplicated += len(turns) - len(answers)
            sums.note(f"session {session} has {len(turns)} turns, and {len(answers)} answers were heard")
        for place, answer in enumerate(answers):
            _compare(sums, answer, turns[place] if place < len(turns) else None, reading)
    _compare_greedy(sums, by_session, recorded)
    return sums


def _compare(sums: Account, heard: Heard, recorded: Recorded | None, reading: Reading) -> None:
    sums.answers += 1
    if heard.error is not None or recorded is None:
        sums.failed += 1
        sums.note(f"session {heard.session}: {heard.error or 'not recorded'}")
        return
    sums.firsts_s.append(heard.first_s)
    sums.pauses_s.append(heard.pause_s)
    ids, spans = recorded.ids, list(recorded.turn.spans)
    sums.tokens += len(ids)
    sums.versions.update(version for version, _ in spans)
    sums.crossing += len(spans) > 1
    text = reading.text(ids, heard.stops)
    if heard.finish is None or recorded.turn.cancelled:
        sums.truncated += 1
    elif heard.text == text and heard.ids in (None, ids):
        _check_end(sums, heard, recorded, reading)
        return
    elif _is_part(heard, text, ids):
        sums.truncated += 1
    elif len(heard.text) > len(text) or (heard.ids is not None and len(heard.ids) > len(ids)):
        sums.duplicated += 1
    else:
        sums.altered += 1
    sums.note(f"session {heard.session}, {spans}: {heard.text!r} ({heard.finish}), expected {text!r}")


def _check_end(sums: Account, heard: Heard, recorded: Recorded, reading: Reading) -> None:
    """Check everything about an answer but its ids and its text."""
    turn, ids = recorded.turn, recorded.ids
    finish, prompt = reading.finish(heard, ids), turn.shared + len(recorded.context)
    numbers = (heard.finish, turn.finish.value, heard.prompt_tokens, heard.completion_tokens)
    if numbers != (finish, finish, prompt, len(ids)):
        sums.ends_wrong += 1
        sums.note(f"session {heard.session}: {numbers}, expected {(finish, finish, prompt, len(ids))}")
    spans = list(turn.spans)
    is_tiled = sum(tokens for _, tokens in spans) == len(ids) == len(recorded.logprobs)
    is_ordered = all(before < after for (before, _), (after, _) in pairwise(spans))
    is_same = heard.spans in (None, spans) and heard.logprobs in (None, recorded.logprobs)
    if not (is_tiled and is_ordered and is_same):
        sums.spans_wrong += 1
        sums.note(f"session {heard.session}: {spans} of {len(ids)} tokens, and {heard.spans} was heard")


def _is_part(heard: Heard, text: str, ids: list[int]) -> bool:
    begins = heard.ids is None or heard.ids == ids[: len(heard.ids)]
    return text.startswith(heard.text) and begins


def _compare_greedy(
    sums: Account, by_session: Mapping[str, Sequence[Heard]], recorded: Mapping[str, Sequence[Recorded]]
) -> None:
    """Compare greedy answers to the same ids with the first of them."""
    firsts: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}
    for session, (answer, *_) in by_session.items():
        if answer.greedy and answer.error is None and recorded.get(session):
            turn = recorded[session][0]
            this = (turn.ids, turn.logprobs)
            other = answer.repeats or firsts.setdefault(tuple(turn.context), this)
            if other is not this:
                _compare_repeat(sums, session, this, other)


def _compare_repeat(
    sums: Account,
    session: str,
    this: tuple[list[int], list[float]],
    other: tuple[list[int], list[float]],
) -> None:
    sums.repeats += 1
    if this[0] == other[0]:
        return
    pairs = enumerate(zip(this[0], other[0], strict=False))
    place = next((place for place, (token, other_token) in pairs if token != other_token), None)
    if place is not None and abs(this[1][place] - other[1][place]) < TIE:
        sums.ties += 1
        return
    sums.repeats_wrong += 1
    sums.note(f"session {session}: a greedy answer is {this[0]}, and another to the same ids {other[0]}")
