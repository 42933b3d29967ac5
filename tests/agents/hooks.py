"""Hooks of slime as the tests name them by import path: sound ones with any client, and hostile ones."""

import asyncio
import copy
import sys
from typing import Any

import aiohttp
import httpx
import openai
import requests
from slime.utils.http_utils import post
from slime.utils.types import Sample


def url_of(args: Any) -> str:
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"


async def fill(args: Any, sample: Sample, ask: Any) -> Sample:
    """Continue the prompt with one completion that ``ask`` gets."""
    payload: dict[str, Any] = {
        "text": sample.prompt,
        "sampling_params": {"max_new_tokens": 50},
        "return_logprob": True,
    }
    output = await ask(f"{url_of(args)}/generate", payload)
    sampled = output["meta_info"]["output_token_logprobs"]
    sample.tokens = [1, 2]
    sample.append_response_tokens(
        args,
        tokens=[token for _, token, _ in sampled],
        log_probs=[logprob for logprob, _, _ in sampled],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    sample.reward = 1.0
    return sample


async def with_post(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    return await fill(args, sample, post)


async def with_aiohttp(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    async def ask(url: str, payload: Any) -> Any:
        async with aiohttp.ClientSession() as session, session.post(url, json=payload) as reply:
            reply.raise_for_status()
            return await reply.json()

    return await fill(args, sample, ask)


async def with_httpx(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    async def ask(url: str, payload: Any) -> Any:
        async with httpx.AsyncClient() as client:
            return (await client.post(url, json=payload)).raise_for_status().json()

    return await fill(args, sample, ask)


async def with_requests(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    async def ask(url: str, payload: Any) -> Any:
        reply = await asyncio.to_thread(requests.post, url, json=payload)
        reply.raise_for_status()
        return reply.json()

    return await fill(args, sample, ask)


async def with_openai(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    """Ask a chat beside the completion that is trained."""
    async with openai.AsyncOpenAI(base_url=f"{url_of(args)}/v1", api_key="none") as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "#say beside"}])
    return await fill(args, sample, post)


async def changes_args(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    """Write into ``args`` and the sampling parameters, as agents do."""
    assert not hasattr(args, "mine") and sampling_params["max_new_tokens"] == 256
    args.mine, args.reward_key, args.rollout_max_response_len = object(), "other", 1
    args.apply_chat_template_kwargs["x"] = 1
    sampling_params.clear()
    return await fill(args, sample, post)


async def another_temperature(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    async def ask(url: str, payload: Any) -> Any:
        return await post(url, payload | {"sampling_params": {"temperature": 0.1, "max_new_tokens": 50}})

    return await fill(args, sample, ask)


async def without_key(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    args.sglang_router_ip = args.sglang_router_ip.partition("@")[2]
    return await fill(args, sample, post)


async def hangs(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    await fill(args, sample, post)
    await asyncio.Event().wait()
    return sample


async def raises(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    await fill(args, sample, post)
    raise RuntimeError("the environment is broken")


async def exits(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    await with_post(args, sample, sampling_params)
    sys.exit(3)


async def interrupts(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    await with_post(args, sample, sampling_params)
    raise KeyboardInterrupt


async def cancels(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    await with_post(args, sample, sampling_params)
    raise asyncio.CancelledError


async def uneven(args: Any, sample: Sample, sampling_params: Any) -> list[Any]:
    sample = await fill(args, sample, post)
    return [sample, [copy.deepcopy(sample)]]


async def as_many(args: Any, sample: Sample, sampling_params: Any) -> list[Sample]:
    """Return as many siblings as the label says, and one of them without loss."""
    samples = [await fill(args, copy.deepcopy(sample), post) for _ in range(int(sample.label or 0))]
    for each in samples[1:2]:
        each.remove_sample = True
    return samples


async def invents_tokens(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    sample = await fill(args, sample, post)
    sample.append_response_tokens(args, tokens=[70, 71, 72], log_probs=[-0.1] * 3)
    return sample


async def invents_everything(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    sample = await fill(args, sample, post)
    sample.tokens = [1, 2, *[75] * sample.response_length]
    return sample


async def lies_about_log_probs(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    sample = await fill(args, sample, post)
    assert sample.rollout_log_probs
    sample.rollout_log_probs[-1] = -9.0
    return sample


async def lies_about_lengths(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    sample = await fill(args, sample, post)
    sample.loss_mask = [1]
    return sample
