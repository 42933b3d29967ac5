"""Episodes of code that is not ours and talks to the policy over the endpoint of its episode.

open ──► result of the agent ──► close ──► trajectories, with the agent's reward or without
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

from slipstream.rollout.reward.value import judgement_of
from slipstream.rollout.system.network import directly
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory
from slipstream.rollout.workflow.contract import WorkflowContext
from slipstream.rollout.workflow.endpoint import OpenEndpoint
from slipstream.rollout.workflow.limited import OnLimit, limited, wrong_on_limit


class AgentFailed(RuntimeError):
    """An agent has failed for a reason outside the policy."""


LOOPBACK = "127.0.0.1"
"""Address of the endpoint."""


def program_variables(endpoint: OpenEndpoint) -> dict[str, str]:
    """Return the environment of a program of an agent: this process's, without the keys of the run itself.

    The program reaches the endpoint past the environment's proxy.
    """
    variables = {name: value for name, value in os.environ.items() if name not in endpoint.key_variables}
    return variables | directly(LOOPBACK, variables)


class AgentEpisodes(ABC):
    """A workflow whose episodes are what an agent does with the policy's endpoint."""

    needs_endpoint = True

    def __init__(self, *, max_turns: int | None, max_tokens: int | None, on_limit: OnLimit) -> None:
        """``max_turns``, ``max_tokens``: completions and sampled tokens of an episode, after which requests
        are refused. ``on_limit``: treatment of an episode that such a limit, or the length of the context,
        has stopped.
        """
        self._limits = {"max_turns": max_turns, "max_tokens": max_tokens}
        self._on_limit: OnLimit = on_limit

    @abstractmethod
    async def result(self, endpoint: OpenEndpoint, prompt: Prompt) -> object:
        """Let the agent do an episode. Return what a reward returns, or None: it gives none."""

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Sequence[Trajectory]:
        """Run one episode. An exception of the agent after a limit was reached is no failure."""
        assert context.endpoint is not None, "the collector serves an endpoint for this workflow"
        async with context.endpoint.open(**self._limits) as endpoint:
            result: object = None
            try:
                result = await endpoint.run(self.result(endpoint, prompt))
            except Exception:
                if endpoint.limit is None:
                    raise
            trajectories = endpoint.trajectories()
            if endpoint.limit is not None:
                trajectories = [limited(trajectory, self._on_limit) for trajectory in trajectories]
        if result is None:
            return trajectories
        judgement = judgement_of(result, context.reward_key)
        return [trajectory.judged(judgement.reward, judgement.parts) for trajectory in trajectories]


def wrong_limits(max_turns: object, max_tokens: object, on_limit: object) -> list[str]:
    """Return what is wrong with the limits of an agent."""
    return [
        *(
            f"{name}: expected a whole number from 1, found {value!r}"
            for name, value in (("max_turns", max_turns), ("max_tokens", max_tokens))
            if value is not None
            and not (isinstance(value, int) and not isinstance(value, bool) and value > 0)
        ),
        *wrong_on_limit(on_limit),
    ]
