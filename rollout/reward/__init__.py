"""Rewards: what an episode is worth. A recipe names one by import path."""

from collections.abc import Awaitable
from typing import Protocol

from slipstream.rollout.reward.final_answer import FinalAnswer
from slipstream.rollout.trajectory import Prompt, Trajectory

__all__ = ["FinalAnswer", "Reward", "is_accuracy"]


class Reward(Protocol):
    """Judges finished episodes. Any class with this method is one; it need not inherit from ``Reward``.

        class Shortest:
            def __init__(self, limit: int) -> None:
                self._limit = limit

            async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
                return float(trajectory.response_length <= self._limit)

    A recipe names the class and gives its arguments:

        rollout:
          reward: {path: my_package.rewards.Shortest, args: {limit: 200}}

    Rewards may be any finite numbers, and their mean over held-out prompts is reported as a reward. A class
    whose rewards are 1 for a correct response and 0 for any other says so; then their mean is also reported
    as an accuracy, in per cent. Without the attribute it is False:

            is_accuracy = True

    One instance judges all episodes of a run, those of evaluations included, on the event loop of the
    driver: long computations belong in a thread or another process (``asyncio.to_thread``, HTTP requests).
    """

    def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> Awaitable[float]:
        """Return the reward of one finished episode: any finite number.

        ``response`` is the text of the trajectory's last completion, decoded without special tokens.

        Raise an exception only when the episode cannot be judged, for example because a judge is down. The
        episode is then run again, up to ``rollout.episode_attempts`` times, and counted as ``failed``. A
        wrong response is no failure: it gets a low reward.
        """
        ...


def is_accuracy(reward: Reward) -> bool:
    """Return whether the mean of the rewards is an accuracy: the class has ``is_accuracy = True``."""
    return getattr(reward, "is_accuracy", False) is True
