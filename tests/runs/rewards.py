"""A reward of runs, which no policy is too weak for."""

from typing import Any


def length(prompt: Any, response: str, trajectory: Any) -> float:
    """Return a number of 1 to 3 that changes with the length of the response."""
    return 1.0 + len(response) % 3
