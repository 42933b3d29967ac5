"""A reward of runs, which no policy is too weak for."""

from typing import Any


def letters(prompt: Any, response: str, trajectory: Any) -> float:
    """Return a number from 1 to 2 that changes with every letter of the response."""
    return 1.0 + sum(map(ord, response)) % 97 / 97
