"""Votes on one question, and what they decide: the strict plurality. Pure."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Vote(NamedTuple):
    """The content of one answer of the model."""

    score: float
    hint: str | None = None


class Tied(ValueError):
    """Two scores lead."""


def elected(votes: Sequence[Vote]) -> float:
    """Return the score that more votes have than any other. Raises Tied. ``votes``: at least one."""
    counts = Counter(vote.score for vote in votes)
    leaders = counts.most_common(2)
    if len(leaders) == 2 and leaders[0][1] == leaders[1][1]:
        raise Tied(f"the votes are tied: {dict(sorted(counts.items()))}")
    return leaders[0][0]


def hints_for(votes: Sequence[Vote], score: float) -> list[str]:
    """Return the hints of the votes for a score, the longest first, each once."""
    hints = {vote.hint.strip() for vote in votes if vote.score == score and vote.hint and vote.hint.strip()}
    return sorted(hints, key=lambda hint: (-len(hint), hint))
