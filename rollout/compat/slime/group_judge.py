"""slime's reward of whole groups, ``group_rm``, as the judge of a collector."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from slipstream.configs.schema.rollout import JudgingConfig
from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.episode_samples import judgement_of_reward
from slipstream.rollout.compat.slime.group_samples import GroupSamples, flat
from slipstream.rollout.reward.judge.errors import JudgingFailed
from slipstream.rollout.reward.value import Judgement
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.tokens.named_numbers import means_by_name
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory

LONGEST_WAIT_S = 60.0
"""Seconds between two attempts at the longest."""


class GroupJudge:
    """Asks ``custom_rm`` for the rewards of all samples of a group at once, in the collector."""

    of_groups = True

    def __init__(
        self,
        arguments: SlimeArguments,
        samples: GroupSamples,
        settings: JudgingConfig,
        reward_key: str,
    ) -> None:
        """``settings``: time limit and attempts of one question. Raises PluginError."""
        self._ask: Callable[..., Awaitable[object]] = resolve("slime.rollout.rm_hub.batched_async_rm")
        self._arguments = arguments
        self._samples = samples
        self._settings = settings
        self._reward_key = reward_key

    async def judge(self, prompt: Prompt, trajectory: Trajectory) -> Judgement:
        """Return the reward of a trajectory that is a group of its own. Raises JudgingFailed."""
        return (await self.judge_group(prompt, [trajectory]))[0]

    async def judge_group(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """Return the rewards of a group. Raises JudgingFailed after the last attempt."""
        failure, wait_s = "", self._settings.retry_after_s
        for attempt in range(self._settings.attempts):
            if attempt:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    return await self._judgements(prompt, trajectories)
            except TimeoutError:
                failure = f"no answer within {self._settings.timeout_s:g} s (rollout.judging.timeout_s)"
            except (Exception, SystemExit, KeyboardInterrupt) as error:  # user code
                failure = f"{type(error).__name__}: {error}"
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                failure = f"{type(error).__name__}, which the hook has raised itself"
        raise JudgingFailed(
            f"rollout.hooks.group_rm: {self._settings.attempts} attempts at the rewards of a group have "
            f"failed, the last one with {failure}"
        )

    async def _judgements(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        samples = self._samples.of(prompt, trajectories)
        everything = flat(samples)
        rewards = list(cast("Sequence[Any]", await self._ask(self._arguments.copied(), everything)))
        if len(rewards) != len(everything):
            raise ValueError(f"it returned {len(rewards)} rewards for {len(everything)} samples")
        judgements = iter([judgement_of_reward(reward, self._reward_key) for reward in rewards])
        for sample, reward in zip(everything, rewards, strict=True):
            sample.reward = reward
        return [_mean([next(judgements) for _ in flat([sample])]) for sample in samples]


def _mean(judgements: Sequence[Judgement]) -> Judgement:
    """Return the judgement of an episode: the mean of those of its samples."""
    reward = sum(judgement.reward / len(judgements) for judgement in judgements)
    return Judgement(reward, tuple(means_by_name(judgement.parts for judgement in judgements).items()))
