"""Rewards of episodes. A recipe names one by import path; ``docs/rewards.md`` shows them."""

from collections.abc import Awaitable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from slipstream.rollout.reward.value import Judgement
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory

if TYPE_CHECKING:
    from slipstream.rollout.reward.choice import Choice
    from slipstream.rollout.reward.code_tests import CodeTests
    from slipstream.rollout.reward.compute_score import ComputeScore
    from slipstream.rollout.reward.mathematics import MathVerify
    from slipstream.rollout.reward.model.answers import ModelVotes
    from slipstream.rollout.reward.remote import Remote
    from slipstream.rollout.reward.texts import F1, Exact, FinalAnswer, Regex
    from slipstream.rollout.reward.weighted import Weighted

__all__ = [
    "F1",
    "Choice",
    "CodeTests",
    "ComputeScore",
    "Exact",
    "FinalAnswer",
    "GroupReward",
    "Judgement",
    "MathVerify",
    "ModelVotes",
    "Regex",
    "Remote",
    "Reward",
    "RewardValue",
    "Weighted",
    "is_accuracy",
]

_MODULES = {
    "Choice": "choice",
    "CodeTests": "code_tests",
    "ComputeScore": "compute_score",
    "Exact": "texts",
    "F1": "texts",
    "FinalAnswer": "texts",
    "MathVerify": "mathematics",
    "ModelVotes": "model.answers",
    "Regex": "texts",
    "Remote": "remote",
    "Weighted": "weighted",
}
"""Modules of the rewards that ship. A judge process imports the one that it needs: SymPy takes a second."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


RewardValue = float | Mapping[str, float | str] | Judgement
"""A number, or a mapping of numbers. In a mapping, ``rollout.reward_key`` names the number that trains; the
others are metrics. Texts in it are left out. A ``Judgement`` also holds a teacher's scores of the tokens."""


class Reward(Protocol):
    """Judges finished episodes. Any class with this method is one; it need not inherit from ``Reward``.

        class Shortest:
            def __init__(self, limit: int) -> None:
                self._limit = limit

            def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
                return float(trajectory.response_length <= self._limit)

    A recipe names the class and gives its arguments:

        rollout:
          reward: {path: my_package.rewards.Shortest, args: {limit: 200}}

    Rewards may be any finite numbers, and their mean over held-out prompts is reported as a reward. A class
    whose rewards are 1 for a correct response and 0 for any other says so; then their mean is also reported
    as an accuracy, in per cent. Without the attribute it is False:

            is_accuracy = True

    It may also name a function with the parameters of ``score``; ``args`` are then passed with every call.

    Rewards run in judge processes (``rollout.judging``), never in the driver. Each process imports the
    module, constructs one instance, and judges episodes of training and of evaluations with it. If ``score``
    is a plain ``def``, a process judges one episode at a time: write it so if it computes. If it is ``async
    def``, a process judges many at a time on one event loop: write it so if it waits, as for a server.

    A reward may block, print, start processes or crash; none of it delays the run or another episode. A
    process is replaced when it crashes, takes too long or holds too much memory, and the processes that it
    has started and its temporary files are removed with it. So keep nothing in ``self`` that must outlive it.
    Output goes to ``logs/judge-*.log`` in the run folder, and is cut off where it is too much.

    ``prompt`` and ``trajectory`` are copies. Columns of a prompt set arrive as plain data: dates as text.
    """

    def score(
        self, prompt: Prompt, response: str, trajectory: Trajectory
    ) -> RewardValue | Awaitable[RewardValue]:
        """Return the reward of one finished episode: any finite number, or a mapping of finite numbers.

        A mapping holds the number that trains under the name ``rollout.reward_key``. Each other number is a
        metric: ``reward/NAME`` is its mean over the trajectories of a batch that have it.

        ``response`` is the text of the trajectory's last completion, with its special tokens, but without
        the token that ends the turn. ``rollout.judging.reasoning`` says whether the reasoning before an
        answer is a part of it.

        Raise an exception only when the episode cannot be judged, for example because a server is down. Then
        only the judging is tried again, up to ``rollout.judging.attempts`` times, before the group is counted
        as ``failed``; the episode is not run again. Everything but a finite number is such a failed attempt:
        None, NaN, an exit, a cancellation, a crash, and more than ``rollout.judging.timeout_s`` seconds. A
        wrong response is no failure: it gets a low reward.
        """
        ...


class GroupReward(Protocol):
    """Judges all episodes of a group at once, when the last of them has ended. Otherwise as ``Reward``.

        class MostFrequent:
            def score_group(
                self, prompt: Prompt, responses: list[str], trajectories: list[Trajectory]
            ) -> list[float]:
                [(majority, _)] = Counter(responses).most_common(1)
                return [float(response == majority) for response in responses]

    A group is one question: it has one time limit, and is asked about again as a whole. A reward that the
    workflow has set stays as it is; ``score_group`` finds it in ``trajectory.reward``. In an evaluation,
    each completion is a group of its own.
    """

    def score_group(
        self, prompt: Prompt, responses: list[str], trajectories: list[Trajectory]
    ) -> Sequence[RewardValue] | Awaitable[Sequence[RewardValue]]:
        """Return the reward of each episode, in the order of ``responses``.

        What counts as a failed attempt: as of ``Reward.score``, for each of them.
        """
        ...


def is_accuracy(reward: object) -> bool:
    """True if the mean of the rewards is an accuracy: the class has ``is_accuracy = True``."""
    return getattr(reward, "is_accuracy", False) is True
