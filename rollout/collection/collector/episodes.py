"""One episode: the user's workflow, with a time limit and several attempts.

Only an episode that this process has given up ends quietly. Whatever else a workflow lets out, CancelledError
and SystemExit included, is a failed attempt, never a neutral score.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.rollout.engine.engine_pool import NoEngine
from slipstream.rollout.reward.judge.judge_errors import JudgeStartFailed, JudgingFailed
from slipstream.rollout.reward.value import NoNumber, check_parts, number_of
from slipstream.rollout.system.plugins import place_of
from slipstream.rollout.system.time_limit import TimeLimit
from slipstream.rollout.tokens.teacher import TeacherScores
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, Trajectory, joined
from slipstream.rollout.workflow import GroupRejected, Workflow, WorkflowContext

LARGEST_LOGPROB = 1e-3
"""A log-prob above 0 by more than rounding is no log-prob."""

KINDS = {"tokens_T": "iu", "loss_mask_T": "b", "logprobs_T": "f", "versions_T": "iu"}
"""Kinds of the elements of a trajectory's arrays, as numpy calls them."""

ErrorT = TypeVar("ErrorT", bound=BaseException)


class EpisodeFailed(RuntimeError):
    """An episode has failed as often as ``rollout.episode_attempts`` allows, or cannot be judged."""


class EpisodeHost(Protocol):
    """The owner of an episode, as its attempts see it."""

    @property
    def is_given_up(self) -> bool:
        """This process needs the episode no more."""
        ...

    def begin(self, attempt: int) -> WorkflowContext:
        """Begin an attempt, from 0. Return what the workflow may use in it, without any number so far."""
        ...

    def accept(self, trajectory: Trajectory) -> None:
        """Raise ValueError for a trajectory that the completions of the attempt contradict."""
        ...


class Episodes:
    """Runs episodes of one workflow."""

    def __init__(
        self,
        workflow: Workflow,
        rollout: RolloutConfig,
        check: Callable[[object], Trajectory],
        limit: TimeLimit,
        failed: Callable[[int, int, str], None],
        name: str = "the workflow",
    ) -> None:
        """``check`` returns a trajectory as it is to be trained, or raises ValueError.
        ``failed(prompt, attempt, error)`` hears of failed attempts.
        ``name``: the workflow, as messages name it.
        """
        self.name = name
        self._workflow = workflow
        self._attempts = rollout.episode_attempts
        self.check = check
        self._limit = limit
        self._failed = failed

    async def run(self, prompt: Prompt, host: EpisodeHost) -> Trajectory:
        """Return a trajectory, with a reward or without.

        Raises EpisodeFailed after the last attempt; NoEngine and JudgeStartFailed, which no attempt can mend;
        GroupRejected, with which the workflow gives its group up; and CancelledError when the host has given
        the episode up.
        """
        failure = ""
        for attempt in range(self._attempts):
            context = host.begin(attempt)
            try:
                with self._limit():
                    trajectory = await self._workflow.run(prompt, context)
                trajectory = context.numbers.attached(self._whole(trajectory))
                host.accept(trajectory)
            except GeneratorExit:  # the event loop is gone
                raise
            except BaseException as error:  # user code: whatever it raises, the attempt has failed
                failure = self._failure(prompt, host, error)
                self._failed(prompt.id, attempt + 1, failure)
            else:
                if host.is_given_up:  # the workflow has not let the cancellation out
                    raise asyncio.CancelledError
                return trajectory
        raise EpisodeFailed(f"{prompt.reference}: {failure}")

    def _whole(self, returned: object) -> Trajectory:
        """Return what a workflow has returned, one trajectory or several, as one. Raises ValueError."""
        if isinstance(returned, Sequence) and not isinstance(returned, str | bytes):
            return joined([self.check(part) for part in cast("Sequence[object]", returned)])
        return self.check(returned)

    def _failure(self, prompt: Prompt, host: EpisodeHost, error: BaseException) -> str:
        """Return why an attempt has failed. Raises what is no failure of the attempt."""
        if host.is_given_up:
            raise asyncio.CancelledError from error
        if (fatal := _within(error, NoEngine) or _within(error, JudgeStartFailed)) is not None:
            raise fatal
        if isinstance(error, GroupRejected):
            raise error
        if (judging := _within(error, JudgingFailed)) is not None:  # judging has attempts of its own
            raise EpisodeFailed(f"{prompt.reference}: {judging}") from error
        task = asyncio.current_task()
        while task is not None and task.cancelling():  # by the workflow itself
            task.uncancel()
        return blame(self.name, error)


def describe(error: BaseException) -> str:
    """Return kind and message of an error of user code."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as second:
        return f"{type(error).__name__}, which cannot be shown: {type(second).__name__}"


def blame(name: str, error: BaseException) -> str:
    """Return whose code has failed, the place in it, and how: an error as messages show it."""
    place = place_of(error)
    return f"{name}, {place}: {describe(error)}" if place else f"{name}: {describe(error)}"


def _within(error: BaseException, kind: type[ErrorT]) -> ErrorT | None:
    """Return the error itself, or the first one of that kind in a group of errors."""
    if isinstance(error, kind):
        return error
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            if (inner := _within(each, kind)) is not None:
                return inner
    return None


def check(trajectory: object, *, vocab_size: int, workflow: str) -> Trajectory:
    """Return the trajectory, with its reward as a plain float.

    Raises ValueError for a trajectory that must not be trained. ``workflow``: import path, for messages.
    """
    if not isinstance(trajectory, Trajectory):
        raise ValueError(
            f"{workflow} returned {type(trajectory).__name__}, expected a slipstream.Trajectory, or a list "
            "of them"
        )
    _check_types(trajectory, workflow)
    _check_values(trajectory, vocab_size, workflow)
    try:
        if trajectory.reward_parts:
            check_parts(trajectory.reward_parts)
        if trajectory.reward is None:
            return trajectory
        reward = number_of(trajectory.reward)
        return (
            trajectory
            if type(trajectory.reward) is float
            else trajectory.judged(reward, trajectory.reward_parts)
        )
    except NoNumber as error:
        raise ValueError(f"{workflow} gave no reward: {error}") from error


def _check_types(trajectory: Trajectory, workflow: str) -> None:
    lengths: set[int] = set()
    for name, kinds in KINDS.items():
        array: npt.NDArray[np.generic] | object = getattr(trajectory, name)
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kinds:
            kind = f"{array.ndim}-dimensional {array.dtype}" if isinstance(array, np.ndarray) else type(array)
            raise ValueError(f"{workflow}: {name} is {kind}; its documentation says what it must be")
        lengths.add(len(array))
    if len(lengths) != 1:
        raise ValueError(f"{workflow}: the arrays of the trajectory have the lengths {sorted(lengths)}")
    if not isinstance(trajectory.finish, Finish) or type(trajectory.retractions) is not int:
        raise ValueError(
            f"{workflow}: finish is {trajectory.finish!r} and retractions is {trajectory.retractions!r}, "
            "expected a slipstream Finish and an integer"
        )
    teacher = cast(object, trajectory.teacher)
    if teacher is not None and not isinstance(teacher, TeacherScores):
        raise ValueError(f"{workflow}: teacher is {type(teacher).__name__}, expected TeacherScores or None")
    if any(reward is None for _, reward in trajectory.turn_rewards):
        raise ValueError(f"{workflow}: a turn has the reward None, expected a finite number")


def _check_values(trajectory: Trajectory, vocab_size: int, workflow: str) -> None:
    tokens_T, sampled_T = trajectory.tokens_T, trajectory.versions_T != UNSAMPLED
    if not sampled_T.any():
        raise ValueError(f"{workflow}: {len(tokens_T)} tokens, none of them sampled by the policy")
    if not (tokens_T.min() >= 0 and tokens_T.max() < vocab_size):
        wrong = tokens_T[(tokens_T < 0) | (tokens_T >= vocab_size)]
        raise ValueError(
            f"{workflow}: token ids {wrong[:5].tolist()} are outside the vocabulary of {vocab_size}"
        )
    if (trajectory.loss_mask_T & ~sampled_T).any():
        raise ValueError(f"{workflow}: tokens carry loss that no policy sampled")
    if trajectory.teacher is not None and trajectory.teacher.largest_id >= vocab_size:
        raise ValueError(
            f"{workflow}: a teacher's token id {trajectory.teacher.largest_id} is outside the vocabulary of "
            f"{vocab_size}"
        )
    logprobs = trajectory.logprobs_T[sampled_T]
    is_logprob = np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB)
    if not is_logprob.all():
        wrong = logprobs[~is_logprob][:5].tolist()
        raise ValueError(f"{workflow}: log-probs {wrong}, expected finite numbers of at most 0")
