"""What an episode is worth. A reward is any class with this one method, named by import path."""

from collections.abc import Awaitable
from typing import Protocol

from slipstream.rollout.reward.final_answer import FinalAnswer
from slipstream.rollout.trajectory import Prompt, Trajectory

__all__ = ["FinalAnswer", "Reward"]


class Reward(Protocol):
    def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> Awaitable[float]:
        """The reward of one finished episode.

        ``response`` is the decoded text of the trajectory's last completion. Raise when the episode cannot
        be judged: that is a failure, which is retried and counted, not a wrong answer.
        """
        ...
