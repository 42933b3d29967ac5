"""Episodes for somebody who wants to look at them. Nothing is recorded or trained."""

import asyncio
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.rollout.collection.collector.episodes import EpisodeFailed, Episodes
from slipstream.rollout.collection.collector.evaluation import UnrecordedGenerator
from slipstream.rollout.collection.collector.judging import Judges, WorkflowReward
from slipstream.rollout.collection.collector.parts import EpisodeParts
from slipstream.rollout.collection.collector.seeded import seeded_engines
from slipstream.rollout.engine.engine_pool import EnginePool
from slipstream.rollout.reward.judge.judge_errors import JudgingFailed
from slipstream.rollout.system.time_limit import TimeLimit
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory
from slipstream.rollout.workflow import GroupRejected, Workflow, WorkflowContext
from slipstream.rollout.workflow.numbers import EpisodeNumbers


@dataclass(frozen=True)
class TriedEpisode:
    """One episode, with all that went wrong in it."""

    prompt: Prompt
    trajectory: Trajectory | None
    """With its reward. Without one, or None: the episode has failed."""
    failures: Sequence[str]
    """Failed attempts in their order, with tracebacks where user code has raised something."""
    seconds: float
    judging_s: float
    """Seconds in which the recipe's reward judged the trajectory, which are not among ``seconds``."""

    @property
    def has_failed(self) -> bool:
        """True if the episode has no reward."""
        return self.trajectory is None or self.trajectory.reward is None


class Trial:
    """Runs episodes of a recipe. Single event loop."""

    def __init__(
        self,
        parts: EpisodeParts,
        pool: EnginePool,
        judges: Judges,
        limit: TimeLimit,
        *,
        evaluates: bool = False,
    ) -> None:
        """``evaluates``: sample as evaluations do; else as training does."""
        self._parts = parts
        self._limit = limit
        reward, sampling = WorkflowReward(judges, limit), parts.rollout.sampling
        engines = seeded_engines(pool, sampling.seed, "tried")
        sampled = parts.context(UnrecordedGenerator(engines, greedy=False), reward, sampling)
        self._context = parts.evaluation_context() if evaluates else sampled

    async def run(self, prompt: Prompt) -> TriedEpisode:
        """Return one episode. Raises NoEngine and JudgeStartFailed."""
        attempts = _Attempts(self._parts.workflow, self._context)
        rollout = self._parts.rollout
        episodes = Episodes(
            attempts, rollout, self._parts.check, self._limit, attempts.attempt_failed, self._parts.name
        )
        trajectory, began, judging_s = None, time.monotonic(), 0.0
        try:
            trajectory = await episodes.run(prompt, attempts)
        except EpisodeFailed as error:
            if not attempts.failures:  # the workflow has asked for a reward in vain
                attempts.failures.append(str(error))
        except GroupRejected as error:
            attempts.failures.append(f"the workflow rejects the group: {error}")
        seconds = time.monotonic() - began
        if trajectory is not None and trajectory.reward is None:
            began = time.monotonic()
            try:
                judgement = await self._parts.judge.judge(prompt, trajectory)
                trajectory = trajectory.judged(judgement.reward, judgement.parts)
            except JudgingFailed as error:
                attempts.failures.append(str(error))
            judging_s = time.monotonic() - began
        return TriedEpisode(prompt, trajectory, tuple(attempts.failures), seconds, judging_s)


class _Attempts:
    """The workflow of one episode, the owner of its attempts, and who hears that they have failed."""

    def __init__(self, workflow: Workflow, context: WorkflowContext) -> None:
        self._workflow = workflow
        self._context = context
        self._traceback = ""
        self.is_given_up = False
        self.failures: list[str] = []

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Trajectory | Sequence[Trajectory]:
        try:
            return await self._workflow.run(prompt, context)
        except (JudgingFailed, GroupRejected):
            raise
        except asyncio.CancelledError:  # by the time limit
            raise
        except BaseException as error:
            self._traceback = "".join(traceback.format_exception(_below_here(error)))
            raise

    def begin(self, attempt: int) -> WorkflowContext:
        return replace(self._context, numbers=EpisodeNumbers())

    def accept(self, trajectory: Trajectory) -> None:
        """Accept everything: it is not trained."""

    def attempt_failed(self, prompt: int, attempt: int, error: str) -> None:
        self.failures.append(self._traceback.rstrip() or error)
        self._traceback = ""


def _below_here(error: BaseException) -> BaseException:
    """Return an error without the frame of this module, for those who read the traceback."""
    below = error.__traceback__ and error.__traceback__.tb_next
    return error.with_traceback(below)
