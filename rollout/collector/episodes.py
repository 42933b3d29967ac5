"""One episode: the user's workflow, with a time limit and several attempts.

Only a cancellation that this process asked for ends an episode quietly. Whatever else a workflow lets out,
CancelledError and SystemExit included, is a failed attempt, never a neutral score.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.rollout.collector.time_limit import TimeLimit
from slipstream.rollout.engine.pool import NoEngine
from slipstream.rollout.judge.errors import JudgeStartFailed, JudgingFailed
from slipstream.rollout.trajectory import UNSAMPLED, Prompt, Trajectory
from slipstream.rollout.workflow import Workflow, WorkflowContext

LARGEST_LOGPROB = 1e-3
"""A log-prob above 0 by more than rounding is no log-prob."""


class EpisodeFailed(RuntimeError):
    """An episode has failed as often as ``rollout.episode_attempts`` allows, or cannot be judged."""


class AttemptListener(Protocol):
    """Hears of failed attempts."""

    def attempt_failed(self, prompt: int, attempt: int, error: str) -> None: ...


class Episodes:
    """Runs episodes of one workflow."""

    def __init__(
        self,
        workflow: Workflow,
        rollout: RolloutConfig,
        check: Callable[[Trajectory], None],
        limit: TimeLimit,
        listener: AttemptListener,
    ) -> None:
        """``check`` raises ValueError for a trajectory that must not be trained."""
        self._workflow = workflow
        self._attempts = rollout.episode_attempts
        self._check = check
        self._limit = limit
        self._listener = listener

    async def run(
        self, prompt: Prompt, context: WorkflowContext, again: Callable[[], None] | None = None
    ) -> Trajectory:
        """Return a trajectory, with a reward or without. ``again`` is called before each further attempt.

        Raises EpisodeFailed after the last attempt; NoEngine and JudgeStartFailed, which no attempt can mend.
        """
        failure = ""
        for attempt in range(1, self._attempts + 1):
            if attempt > 1 and again is not None:
                again()
            try:
                with self._limit():
                    trajectory = await self._workflow.run(prompt, context)
                self._check(trajectory)
                return trajectory
            except (NoEngine, JudgeStartFailed):
                raise
            except JudgingFailed as error:  # judging has attempts of its own
                raise EpisodeFailed(f"prompt {prompt.id}: {error}") from error
            except BaseException as error:  # user code: whatever it raises, the attempt has failed
                if _is_cancelled(error):
                    raise
                failure = f"{type(error).__name__}: {error}"
                self._listener.attempt_failed(prompt.id, attempt, failure)
        raise EpisodeFailed(f"prompt {prompt.id}: {failure}")


def _is_cancelled(error: BaseException) -> bool:
    """Return whether the running task has been cancelled by someone else than its own code."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def check(trajectory: object, *, vocab_size: int, workflow: str) -> None:
    """Raise ValueError for a trajectory that must not be trained. ``workflow``: import path, for messages."""
    if not isinstance(trajectory, Trajectory):
        raise ValueError(f"{workflow} returned {type(trajectory).__name__}, expected a slipstream.Trajectory")
    reward = trajectory.reward
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"{workflow} gave the reward {reward}, expected a finite number or None")
    tokens_T, logprobs_T = trajectory.tokens_T, trajectory.logprobs_T
    sampled_T = trajectory.versions_T != UNSAMPLED
    lengths = {len(tokens_T), len(logprobs_T), len(sampled_T), len(trajectory.loss_mask_T)}
    if len(lengths) != 1:
        raise ValueError(f"{workflow}: the arrays of the trajectory have the lengths {sorted(lengths)}")
    if len(tokens_T) and not (tokens_T.min() >= 0 and tokens_T.max() < vocab_size):
        wrong = tokens_T[(tokens_T < 0) | (tokens_T >= vocab_size)]
        raise ValueError(
            f"{workflow}: token ids {wrong[:5].tolist()} are outside the vocabulary of {vocab_size}"
        )
    if (trajectory.loss_mask_T & ~sampled_T).any():
        raise ValueError(f"{workflow}: tokens carry loss that no policy sampled")
    sampled_logprobs = logprobs_T[sampled_T]
    if not (np.isfinite(sampled_logprobs) & (sampled_logprobs <= LARGEST_LOGPROB)).all():
        wrong = sampled_logprobs[~(sampled_logprobs <= LARGEST_LOGPROB) | ~np.isfinite(sampled_logprobs)]
        raise ValueError(f"{workflow}: log-probs {wrong[:5].tolist()}, expected finite numbers of at most 0")
