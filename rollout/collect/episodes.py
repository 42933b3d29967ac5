"""One episode: the user's workflow, with a time limit and several attempts."""

import math

from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.rollout.collect.listener import CollectionListener
from slipstream.rollout.collect.time_limit import TimeLimit
from slipstream.rollout.engine.pool import NoEngine
from slipstream.rollout.ledger.database import LedgerError
from slipstream.rollout.trajectory import Prompt, Trajectory
from slipstream.rollout.workflow import Workflow, WorkflowContext


class EpisodeFailed(RuntimeError):
    """An episode has failed as often as ``rollout.episode_attempts`` allows."""


class Episodes:
    """Runs episodes of one workflow. Whatever a workflow or a reward raises is a failed attempt, never a
    neutral score.
    """

    def __init__(
        self, workflow: Workflow, rollout: RolloutConfig, limit: TimeLimit, listener: CollectionListener
    ) -> None:
        self._workflow = workflow
        self._name = rollout.workflow.path
        self._attempts = rollout.episode_attempts
        self._limit = limit
        self._listener = listener

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Trajectory:
        """Return a judged trajectory.

        Raises EpisodeFailed after the last attempt; NoEngine and LedgerError, which no attempt can mend.
        """
        failure: Exception | None = None
        for attempt in range(1, self._attempts + 1):
            try:
                with self._limit():
                    trajectory = await self._workflow.run(prompt, context)
                if trajectory.reward is None or not math.isfinite(trajectory.reward):
                    raise ValueError(f"{self._name} gave the reward {trajectory.reward}")
                return trajectory
            except (NoEngine, LedgerError):
                raise
            except Exception as error:  # user code: whatever it raises, the attempt has failed
                self._listener.episode_failed(prompt, attempt, error)
                failure = error
        raise EpisodeFailed(f"prompt {prompt.id}: {type(failure).__name__}: {failure}")
