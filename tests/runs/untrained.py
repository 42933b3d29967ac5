"""Rewards and a group filter of runs in which groups end in every way, or in their own time."""

import asyncio
from typing import Any

from examples.filter.spread import Spread
from examples.reward.closeness import Closeness
from slipstream.rollout.tokens.trajectory import Group


class SometimesBroken(Closeness):
    """Fails for some prompts of training."""

    def score(self, prompt: Any, response: str, trajectory: Any) -> dict[str, float]:
        if prompt.id % 9 == 4 and "heldout" not in prompt.file:
            raise RuntimeError("this prompt has no reward")
        return super().score(prompt, response, trajectory)


class NotEveryThird(Spread):
    """Rejects every third group besides."""

    def keep(self, group: Group) -> bool:
        return super().keep(group) and group.id % 3 != 1


class Unhurried(Closeness):
    """Takes as long as a judge does: what waits for a run leaves it the processor meanwhile."""

    async def score(self, prompt: Any, response: str, trajectory: Any) -> dict[str, float]:
        await asyncio.sleep(2)
        return super().score(prompt, response, trajectory)
