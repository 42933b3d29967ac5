"""``rollout.reward`` of the recipe as slime's ``custom_rm``: for rollout functions of a recipe that names no
reward of slime's.

Functions run on loops of their own: the question goes to the loop of the collector, which has the judges.
"""

import asyncio

import numpy as np

from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.episode_samples import PARTS, SampleLike, finish_of, response_of
from slipstream.rollout.reward.value import EpisodeJudge
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Prompt, Trajectory

PATH = "slipstream.rollout.compat.slime.recipe_reward.score"
"""Import path of this reward."""


PROMPT = "recipe_prompt"
"""Attribute of samples of leased groups: the prompt as the recipe has it, for rewards."""


class _Answering:
    judge: EpisodeJudge | None = None
    loop: asyncio.AbstractEventLoop


def answer_by(judge: EpisodeJudge) -> None:
    """Answer the questions of this process by ``judge``, on the running loop."""
    _Answering.judge, _Answering.loop = judge, asyncio.get_running_loop()


async def score(args: SlimeArguments, samples: SampleLike | list[SampleLike], **kwargs: object) -> object:
    """Return the reward of a sample, or those of several.

    None where the recipe's reward sees whole groups: the collector asks it when the group is complete. Raises
    JudgingFailed.
    """
    if isinstance(samples, list):
        return list(await asyncio.gather(*(_score(args, sample) for sample in samples)))
    return await _score(args, samples)


async def _score(args: SlimeArguments, sample: SampleLike) -> object:
    judge, prompt = _Answering.judge, getattr(sample, PROMPT, None)
    assert judge is not None
    if judge.of_groups and prompt is not None:
        return None
    if prompt is None:  # of an evaluation
        prompt = Prompt(sample.index or 0, sample.prompt, sample.label, dict(sample.metadata))
    question = asyncio.run_coroutine_threadsafe(judge.judge(prompt, _trajectory(sample)), _Answering.loop)
    judgement = await asyncio.wrap_future(question)
    if args.reward_key is not None:
        return {args.reward_key: judgement.reward, **dict(judgement.parts)}
    setattr(sample, PARTS, judgement.parts)
    return judgement.reward


def _trajectory(sample: SampleLike) -> Trajectory:
    """Return what a reward may see of a sample whose versions nobody has looked at yet."""
    tokens, start, mask, logprobs = response_of(sample)
    size, wanted = len(tokens), np.array(mask, np.bool_)
    loss_mask_T, logprobs_T = np.zeros(size, np.bool_), np.zeros(size, np.float32)
    versions_T = np.full(size, UNSAMPLED, np.int32)
    loss_mask_T[start:] = wanted
    versions_T[start:][wanted] = 0
    if logprobs is not None:
        logprobs_T[start:] = logprobs
    return Trajectory(np.array(tokens, np.int64), loss_mask_T, logprobs_T, versions_T, finish_of(sample))
