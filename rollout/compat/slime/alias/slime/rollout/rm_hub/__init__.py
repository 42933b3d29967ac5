"""Rewards by name (``rm_type``) and by import path."""

import asyncio
import random

import aiohttp

from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score as compute_score_dapo
from slime.rollout.rm_hub.math_utils import extract_answer as extract_boxed_answer
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.utils.misc import load_function

__all__ = ["async_rm", "batched_async_rm", "grade_answer_verl", "remote_rm"]

_RULES = {
    "deepscaler": lambda response, label, metadata: get_deepscaler_rule_based_reward(response, label),
    "dapo": lambda response, label, metadata: compute_score_dapo(response, label),
    "math": lambda response, label, metadata: int(grade_answer_verl(response, label)),
    "f1": lambda response, label, metadata: f1_score(response, label)[0],
    "gpqa": compute_gpqa_reward,
    "random": lambda response, label, metadata: random.randint(0, 1),
}


async def remote_rm(args, sample, max_retries: int = 10):
    """Return what the server at ``args.rm_url`` says of a sample. Failures are tried again, ever later."""
    question = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    for attempt in range(1, max_retries + 1):
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
                session.post(args.rm_url, json=question) as reply,
            ):
                reply.raise_for_status()
                return await reply.json()
        except (aiohttp.ClientError, TimeoutError):
            if attempt == max_retries:
                raise
            await asyncio.sleep(min(2**attempt / 2, 30) + random.random())


async def async_rm(args, sample, **kwargs):
    """Return the reward of one sample, by its own path, the recipe's path or its ``rm_type``."""
    path = sample.custom_rm_path or args.custom_rm_path
    if path:
        return await load_function(path)(args, sample, **kwargs)
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    rule = (metadata.get("rm_type") or args.rm_type or "").strip()
    if rule == "remote_rm":
        return await remote_rm(args, sample)
    response = sample.response
    if rule.startswith("boxed_"):
        rule, response = rule.removeprefix("boxed_"), extract_boxed_answer(response) or ""
    if rule not in _RULES:
        names = ", ".join([*_RULES, "remote_rm"])
        raise NotImplementedError(f"rm_type is {rule!r}, expected one of {names}, or a custom_rm_path")
    return await asyncio.to_thread(_RULES[rule], response, sample.label, metadata)


async def batched_async_rm(args, samples, **kwargs):
    """Return the rewards of samples. A custom reward is asked once, for all of them."""
    if args.custom_rm_path is not None:
        return await load_function(args.custom_rm_path)(args, samples, **kwargs)
    return await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples))
