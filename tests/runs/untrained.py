"""A reward and a group filter of runs in which groups end in every way."""

from typing import Any

from slipstream.rollout.tokens.trajectory import Group


def sometimes_broken(prompt: Any, response: str, trajectory: Any) -> float:
    """Return a number that differs between responses, and fail for some prompts of training."""
    if prompt.id % 9 == 4 and "train" in prompt.file:
        raise RuntimeError("this prompt has no reward")
    return sum(map(ord, response)) % 97 / 97


class NotEveryThird:
    """Rejects every third group."""

    def keep(self, group: Group) -> bool:
        return group.id % 3 != 1
