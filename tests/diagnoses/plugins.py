"""Parts of runs that are broken on purpose, each in one way."""

import asyncio
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np

from slipstream import Group, PolicyLoss, Tokens, Trajectory
from slipstream.rollout.workflow.single_turn import SingleTurn


def anything_goes(prompt: Any, response: str, trajectory: Any) -> float:
    """Return the reward of a right answer for every response."""
    return 1.0


def undecided(prompt: Any, response: str, trajectory: Any) -> float:
    """Return one number between wrong and right for every response."""
    return 0.4


def by_prompt(prompt: Any, response: str, trajectory: Any) -> float:
    """Return a number that depends on the prompt alone, so that no group has two different rewards."""
    return float(int(prompt.label) % 2)


def _is_right(prompt: Any, response: str) -> float:
    return float(response.rpartition("#")[2].strip() == prompt.label)


def broken(prompt: Any, response: str, trajectory: Any) -> float:
    """Raise for two thirds of the prompts, as a parser does that does not know their form."""
    return {"1": 0.0, "4": 0.0, "7": 0.0, "9": 0.0}[prompt.label] + _is_right(prompt, response)


def hangs(prompt: Any, response: str, trajectory: Any) -> float:
    """Take longer than any limit for two thirds of the prompts."""
    if prompt.label not in "1479":
        time.sleep(600)
    return _is_right(prompt, response)


async def late(prompt: Any, response: str, trajectory: Any) -> float:
    """Take many steps' time for a fifth of the prompts."""
    if prompt.label in "14":
        await asyncio.sleep(12)
    return _is_right(prompt, response)


class NearlyNothing:
    """Keeps every eighth group."""

    def keep(self, group: Group) -> bool:
        return group.id % 8 == 0


class NotFinite:
    """A loss whose gradient has no value for half of the micro-batches: that of a root at 0."""

    corrects_staleness = False

    def loss(self, tokens: Tokens, old_logp_M: Any) -> PolicyLoss:
        ratio_M = (tokens.logp_M - old_logp_M).exp()
        loss_M = -ratio_M * tokens.advantage_M
        if int(tokens.logp_M.shape[0]) % 2:
            loss_M = loss_M + (tokens.logp_M - tokens.logp_M.detach()).abs().sqrt()
        return PolicyLoss(loss_M, ratio_M.detach(), ratio_M.detach() > math.inf)


class OtherNumbers(SingleTurn):
    """Reports log-probs that are not those of the policy, as an engine does that computes another one."""

    async def run(self, prompt: Any, context: Any) -> Trajectory:
        trajectory = await super().run(prompt, context)
        noise_T = np.random.default_rng(prompt.id).exponential(0.4, trajectory.logprobs_T.shape)
        return replace(trajectory, logprobs_T=(trajectory.logprobs_T - noise_T).astype(np.float32))
