"""A reward of runs, which no policy is too weak for."""

from typing import Any


def letters(prompt: Any, response: str, trajectory: Any) -> float:
    """Return a number from 1 to 2 that changes with every letter of the response."""
    return 1.0 + sum(map(ord, response)) % 97 / 97


def by_place(prompt: Any, responses: list[str], trajectories: list[Any]) -> list[float]:
    """Return rewards of other size and sign for each episode of a group, even where all said the same."""
    return [
        letters(prompt, response, None) * (1.0 if place % 2 == 0 else -0.4)
        for place, response in enumerate(responses)
    ]


def same_question(turn: Any) -> str:
    """Return the last message of a turn as the question about it: the quickstart's policy reads no other."""
    return turn.messages[-1]["content"]


def always_a_hint(text: str) -> tuple[float, str]:
    """Return a vote with a hint."""
    return 1.0, f"not {text[:4]}"


def from_letters(text: str) -> float:
    """Return a score that every answer has."""
    return 1.0 if sum(map(ord, text)) % 2 else -1.0
