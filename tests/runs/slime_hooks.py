"""Hooks of the shape of slime's examples, for runs of the quickstart's policy. Three kinds of episodes:

0  a tool, as in retool: token ids, the tool's tokens without loss
1  a search, as in search-r1: the prompt as text, with stop strings
2  several agents, as in multi_agent: a list of samples, with rewards of their own

Behind them the functions for whole batches.
"""

import asyncio
import copy
import json
import os
from pathlib import Path

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group, generate_rollout
from slime.utils.async_utils import run
from slime.utils.http_utils import post
from slime.utils.types import Sample

TURNS = 2


def note(kind: str, **facts) -> None:
    """Append what a hook has seen to the file that the test reads."""
    with Path(os.environ["SLIME_HOOKS_SEEN"]).open("a") as file:
        file.write(json.dumps({"kind": kind, **facts}) + "\n")


async def generate(args, sample: Sample, sampling_params, evaluation=False):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    args.calls = getattr(args, "calls", 0) + 1  # an episode has args of its own
    assert args.calls == 1
    kinds = (with_tool, with_search, with_agents)
    return await kinds[sample.index % len(kinds)](args, sample, sampling_params, url)


async def with_tool(args, sample: Sample, sampling_params, url: str) -> Sample:
    tokenizer = GenerateState(args).tokenizer
    sample.tokens = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.response, sample.response_length, sample.loss_mask = "", 0, []
    for turn in range(TURNS):
        question = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, question)
        sampled = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[entry[1] for entry in sampled],
            log_probs=[entry[0] for entry in sampled],
            meta_info=output["meta_info"],
            text=output["text"],
        )
        if turn < TURNS - 1:
            answer = tokenizer("tool 7", add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=answer, trainable=False, text="tool 7")
    sample.turns = TURNS
    return sample


async def with_search(args, sample: Sample, sampling_params, url: str) -> Sample:
    tokenizer = GenerateState(args).tokenizer
    sampling_params = {**sampling_params, "stop": ["5", "#"]}
    prompt, response = sample.prompt, ""
    sample.tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    sample.loss_mask = []
    for turn in range(TURNS):
        question = {"text": prompt + response, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, question)
        sampled = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[entry[1] for entry in sampled],
            log_probs=[entry[0] for entry in sampled],
            meta_info=output["meta_info"],
        )
        response += output["text"]
        matched = output["meta_info"]["finish_reason"].get("matched")
        if isinstance(matched, str):
            assert output["text"].endswith(matched), "no_stop_trim keeps the stop string"
            note("stopped", matched=matched)
        if turn < TURNS - 1:
            information = " information 3 "
            ids = tokenizer(information, add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=ids, trainable=False)
            response += information
    sample.response, sample.turns = response, TURNS
    return sample


async def with_agents(args, sample: Sample, sampling_params, url: str) -> list[Sample]:
    solver, critic = copy.deepcopy(sample), copy.deepcopy(sample)
    for each in (solver, critic):
        await with_tool(args, each, dict(sampling_params), url)
        each.turns = 1
        each.reward = {"score": float(len(each.tokens) % 3), "agents": 2}
    return [solver, critic]


async def reward(args, sample, **kwargs):
    assert isinstance(sample, Sample), "siblings have rewards already"
    digits = sum(letter.isdigit() for letter in sample.response)
    return {"score": float(digits % 5), "turns": sample.turns, "text": sample.response[:10]}


async def mark(args, sample, *, rollout_id, evaluation):
    sample.metadata["marked"] = True


def keep_mixed(args, samples, **kwargs) -> DynamicFilterOutput:
    flat = [part for sample in samples for part in (sample if isinstance(sample, list) else [sample])]
    assert all(sample.metadata["marked"] and sample.turns for sample in flat)
    rewards = {sample.get_reward_value(args) for sample in flat}
    return DynamicFilterOutput(keep=len(rewards) > 1, reason="equal")


def remove_first(args, groups) -> None:
    for group in groups:
        first = group[0][0] if isinstance(group[0], list) else group[0]
        first.remove_sample = True


def see_all(args, groups, data_source) -> None:
    for group in groups:
        note("group", samples=[len(each) if isinstance(each, list) else 1 for each in group])


class Numbered(RolloutDataSourceWithBuffer):
    """The prompts of the recipe, each with its number."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = super().get_samples(num_samples)
        for group in groups:
            for sample in group:
                sample.metadata = {"number": sample.group_index}
                sample.drawn_by = "Numbered"
        return groups


def collect(args, rollout_id, data_source, evaluation=False):
    """A batch of groups: one of them is dropped, and in the first call one is given back."""
    state = GenerateState(args)

    async def batch(groups):
        tasks = [generate_and_rm_group(args, group, dict(state.sampling_params)) for group in groups]
        return await asyncio.gather(*tasks)

    groups = data_source.get_samples(args.rollout_batch_size)
    assert all(sample.drawn_by == "Numbered" for group in groups for sample in group)
    numbers = [group[0].metadata["number"] for group in groups]
    given_back = groups[1:2] if not getattr(args, "gave_back", False) else []
    args.gave_back = True  # the namespace of all calls
    done = run(batch([group for group in groups if group not in given_back]))
    data_source.add_samples(given_back)
    dropped = done[:1] if len(done) > 2 else []
    note(
        "call",
        rollout_id=rollout_id,
        numbers=numbers,
        dropped=[group[0].metadata["number"] for group in dropped],
        given_back=[group[0].metadata["number"] for group in given_back],
    )
    return RolloutFnTrainOutput([group for group in done if group not in dropped], {"calls": 1.0})


def take_last(args, rollout_id, buffer, num_samples):
    note("buffer", numbers=[group[0].metadata["number"] for group in buffer])
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def evaluate(args, rollout_id, data_source, evaluation=False):
    output = generate_rollout(args, rollout_id, data_source, evaluation=True)
    [values] = output.data.values()
    lengths = [sample.response_length for sample in values["samples"]]
    note("evaluation", rollout_id=rollout_id, rewards=values["rewards"], lengths=lengths)
    return {"first": values, "second": {"rewards": [0.25, 0.75]}}


def log_evaluation(rollout_id, args, data, extra_metrics):
    note("logged", names=sorted(data), rewards=data["second"]["rewards"])
    return False
