"""Branches of a session by the entries of its journal alone: an oracle for sessions, which decide as they go.

    t1 ─► t2 ─► t4        one branch: each prompt repeats all tokens of the turn before
     │     └──► t5        a branch: it repeats all of t2, which t4 continues already
     └─ · ─► t3           a branch: it repeats only a part of t1

A turn is trained if it is a main turn that was not cancelled. Each trained turn is on one branch, and its
sampled tokens carry loss there. To all other branches that repeat them they are context. A turn continues the
branch of a trained turn if its prompt repeats all tokens of it, directly or through turns that are not
trained, and if it is the first to do so, in the order of the journal. Otherwise it begins a branch. What a
turn is on is therefore known when it arrives and never changes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.rollout.tokens.record import decode_chunks
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Trajectory
from slipstream.rollout.tokens.turn_entries import Turn, TurnType


class RecordedTurn(NamedTuple):
    """A turn as the journal has it."""

    turn: Turn
    chunk: bytes


class BranchTurn(NamedTuple):
    """A trained turn on a branch."""

    number: int
    start: int
    """Its sampled tokens are [start, end) of the branch."""
    end: int


@dataclass(frozen=True)
class Branch:
    """Turns that train together, as one trajectory."""

    turns: tuple[BranchTurn, ...]
    """In order. Their tokens, and no others, carry loss."""
    trajectory: Trajectory
    """Without rewards."""


class BranchError(ValueError):
    """Entries do not fit together."""


@dataclass(slots=True)
class _Place:
    """Where a turn is."""

    length: int
    """Tokens of its prompt and answer."""
    trained: bool
    anchor: int | None
    """The nearest trained turn whose tokens it repeats whole, through turns that are not trained."""
    before: int | None = None
    """The trained turn before it on its branch."""
    first: int | None = None
    """The first turn of its branch; None: it is not trained."""


class Branches:
    """Places turns on branches as they arrive, in the order of the journal."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        self._continued: set[int] = set()

    def add(self, number: int, turn: Turn, tokens: int) -> int | None:
        """Place a turn whose chunk has ``tokens`` tokens, context included.

        Returns the number of the first turn of its branch; None: it is not trained. Raises BranchError.
        """
        place = _Place(turn.shared + tokens, is_trained(turn), None)
        if turn.parent is not None:
            parent = self._places.get(turn.parent)
            if parent is None or turn.shared > parent.length:
                have = "is unknown" if parent is None else f"has {parent.length} tokens"
                raise BranchError(
                    f"turn {number} shares {turn.shared} tokens with turn {turn.parent}, which {have}"
                )
            if turn.shared == parent.length:
                place.anchor = turn.parent if parent.trained else parent.anchor
        elif turn.shared:
            raise BranchError(f"turn {number} shares {turn.shared} tokens and has no parent")
        if place.trained:
            place.first = number
            if place.anchor is not None and place.anchor not in self._continued:
                self._continued.add(place.anchor)
                place.before = place.anchor
                place.first = self._places[place.anchor].first
        self._places[number] = place
        return place.first

    def members(self, last: int) -> list[int]:
        """Return the trained turns on the branch of ``last``, up to it, in order."""
        members: list[int] = []
        step: int | None = last
        while step is not None:
            members.append(step)
            step = self._places[step].before
        members.reverse()
        return members if self._places[last].trained else []


def is_trained(turn: Turn) -> bool:
    """Return whether the sampled tokens of a turn carry loss."""
    return turn.turn_type is TurnType.MAIN and not turn.cancelled


def branches_of(turns: Mapping[int, RecordedTurn]) -> Branches:
    """Return the branches of turns, by their numbers. Raises BranchError."""
    branches = Branches()
    for number in sorted(turns):
        turn, chunk = turns[number]
        tokens = sum(len(part.context) + len(part.tokens) for part in decode_chunks(chunk))
        branches.add(number, turn, tokens)
    return branches


def rebuild(turns: Mapping[int, RecordedTurn], last: int, members: Iterable[int]) -> Branch:
    """Return the branch that ends with the turn ``last``, where the turns ``members`` carry loss.

    ``turns`` must have ``last`` and all turns from which it descends. Raises BranchError, CorruptRecord.
    """
    trained = frozenset(members)
    line = _line(turns, last)
    parts = [_tokens(number, *turns[number], carries_loss=number in trained) for number in line]
    kept: list[_Tokens] = []
    placed: list[BranchTurn] = []
    end = parts[-1].end
    for number, part in zip(reversed(line), reversed(parts), strict=True):
        if part.end < end:
            raise BranchError(f"turn {number} has {part.end} tokens, of which a later turn shares {end}")
        if number in trained:
            if part.end > end:
                raise BranchError(
                    f"turn {number} is not repeated whole, and cannot carry loss on this branch"
                )
            placed.append(BranchTurn(number, part.end - part.sampled, part.end))
        if part.start < end:
            kept.append(part.until(end))
            end = part.start
    if end:
        raise BranchError(f"turn {line[0]} shares {end} tokens and has no parent")
    kept.reverse()
    trajectory = Trajectory(
        np.concatenate([part.ids for part in kept]).astype(np.int64),
        np.concatenate([part.mask for part in kept]),
        np.concatenate([part.logprobs for part in kept]),
        np.concatenate([part.versions for part in kept]),
        turns[last].turn.finish,
    )
    return Branch(tuple(reversed(placed)), trajectory)


class _Tokens(NamedTuple):
    """Tokens [start, end) of a branch."""

    start: int
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    sampled: int

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def until(self, end: int) -> "_Tokens":
        """Return the tokens before ``end``."""
        count = end - self.start
        return _Tokens(
            self.start,
            self.ids[:count],
            self.mask[:count],
            self.logprobs[:count],
            self.versions[:count],
            self.sampled,
        )


def _tokens(number: int, turn: Turn, chunk: bytes, *, carries_loss: bool) -> _Tokens:
    """Return what a turn adds to its branch."""
    parts = [*decode_chunks(chunk)]
    if len(parts) != 1:
        raise BranchError(f"turn {number} has {len(parts)} chunks, expected one")
    context, tokens, logprobs = parts[0]
    lengths = [length for _, length in turn.spans]
    if sum(lengths) != len(tokens):
        raise BranchError(f"the version spans {turn.spans} of turn {number} do not tile {len(tokens)} tokens")
    ids = np.concatenate((context, tokens)).astype(np.int32)
    mask = np.zeros(len(ids), np.bool_)
    scores = np.zeros(len(ids), np.float32)
    versions = np.full(len(ids), UNSAMPLED, np.int32)
    if carries_loss:
        mask[len(context) :] = True
        scores[len(context) :] = logprobs
        versions[len(context) :] = np.repeat([version for version, _ in turn.spans], lengths)
    return _Tokens(turn.shared, ids, mask, scores, versions, len(tokens))


def _line(turns: Mapping[int, RecordedTurn], last: int) -> list[int]:
    """Return a turn and all turns from which it descends, the first one first."""
    line: list[int] = []
    step: int | None = last
    while step is not None:
        if step not in turns:
            raise BranchError(f"turn {step}, from which turn {last} descends, is missing")
        line.append(step)
        step = turns[step].turn.parent
    line.reverse()
    return line


def messages_of_turn(turns: Mapping[int, Turn], number: int) -> list[dict[str, object]]:
    """Return the messages of a turn's request, its answer not included. Raises BranchError."""
    messages: list[dict[str, object]] = []
    line: list[int] = []
    step: int | None = number
    while step is not None:
        if step not in turns:
            raise BranchError(f"turn {step}, from which turn {number} descends, is missing")
        line.append(step)
        step = turns[step].parent
    for step in reversed(line):
        turn = turns[step]
        parent = turn.parent
        if parent is not None:
            messages.append(msgspec.json.decode(turns[parent].answer, type=dict[str, object]))
        del messages[turn.kept :]
        messages += msgspec.json.decode(turn.messages, type=list[dict[str, object]])
    return messages
