"""Judging: finished episodes in, rewards out.

    episode ──(prompt, response, trajectory)──► reward.score ──► reward of the trajectory
       │                                             │
       └── last episode of the group: JUDGING ◄──────┘ group complete: filter, then READY

A question is asked in the task of its episode, so that there are never more open questions than episodes, and
a slow reward delays its own group only: engines and trainer go on. Back-pressure is the slot of the group,
which stays taken until the group has ended. Time spent here counts towards ``rollout.episode_timeout_s``.
"""

from collections.abc import Awaitable, Callable, Iterable

from slipstream.rollout.reward import Reward
from slipstream.rollout.trajectory import Prompt, Trajectory


class GroupJudging:
    """The reward, as the episodes of one group ask for it."""

    def __init__(self, reward: Reward, generating: Iterable[int], on_last: Callable[[], None]) -> None:
        """``generating``: numbers of the episodes that still generate. ``on_last`` is called once, when the
        last of them asks for its reward: from then on the group waits for nothing but rewards.
        """
        self._reward = reward
        self._generating = set(generating)
        self._on_last = on_last

    def of_episode(self, number: int) -> Reward:
        """Return the reward for episode ``number``."""
        return _EpisodeReward(self._reward, number, self)

    def asked(self, number: int) -> None:
        """Note that episode ``number`` asks for its reward. A further attempt of it changes nothing."""
        if number in self._generating:
            self._generating.remove(number)
            if not self._generating:
                self._on_last()


class _EpisodeReward:
    __slots__ = ("_group", "_number", "_reward")

    def __init__(self, reward: Reward, number: int, group: GroupJudging) -> None:
        self._reward = reward
        self._number = number
        self._group = group

    def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> Awaitable[float]:
        self._group.asked(self._number)
        return self._reward.score(prompt, response, trajectory)
