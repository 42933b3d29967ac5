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
