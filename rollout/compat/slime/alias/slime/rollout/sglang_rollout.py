"""Generation with the policy: what custom functions build on, and the default of every hook around them."""

import asyncio
import copy
import inspect
import uuid
from contextlib import contextmanager

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import recipe_prompts, samples_of
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.utils.async_utils import run
from slime.utils.http_utils import get_rollout_num_engines, post
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample

__all__ = ["generate_rollout", "get_model_url"]

_DONE = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


def get_model_url(args, model_name: str, endpoint: str = "/generate") -> str:
    """Return the URL of a named model, or of the policy where there is no model of that name."""
    routers = getattr(args, "sglang_model_routers", None) or {}
    ip, port = routers.get(model_name, (args.sglang_router_ip, args.sglang_router_port))
    return f"http://{ip}:{port}{endpoint}"


class GenerateState(metaclass=SingletonMeta):
    """The state that all episodes of a process share: the tokenizer, and the limit of running requests."""

    def __init__(self, args) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self.processor = load_processor(args.hf_checkpoint, trust_remote_code=True)
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * get_rollout_num_engines(args))
        self.sampling_params = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
            "skip_special_tokens": args.rollout_skip_special_tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        self.group_sampling_seeds = [args.rollout_seed + index for index in range(args.n_samples_per_prompt)]
        self.dp_counts = [0]
        self.dp_rank = 0
        self.reset()

    @contextmanager
    def dp_rank_context(self):
        """Engines choose among their replicas themselves."""
        yield self.dp_rank

    def reset(self) -> None:
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task] = set()
        self.aborted = False

    def submit_generate_tasks(self, samples: list[list[Sample]]) -> None:
        for group in samples:
            params = dict(self.sampling_params)
            self.pendings.add(asyncio.create_task(generate_and_rm_group(self.args, group, params)))
        self.remaining_batch_size += len(samples)


async def generate(args, sample: Sample, sampling_params: dict) -> Sample:
    """Continue a sample with one completion, at most ``max_new_tokens`` in all, and return it."""
    if sample.status not in (Sample.Status.PENDING, Sample.Status.ABORTED):
        raise AssertionError(f"Sample status is {sample.status}, expected PENDING or ABORTED")
    sampling_params["max_new_tokens"] -= sample.response_length
    if sampling_params["max_new_tokens"] < 0:
        raise AssertionError(f"the response of {sample.response_length} tokens is longer than max_new_tokens")
    if sampling_params["max_new_tokens"] == 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    if not sample.tokens:
        tokenizer = GenerateState(args).tokenizer
        sample.tokens = list(tokenizer.encode(sample.prompt, add_special_tokens=False))
    question = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", question)
    meta_info = output["meta_info"]
    sampled = meta_info.get("output_token_logprobs", ())
    sample.append_response_tokens(
        args,
        tokens=[entry[1] for entry in sampled],
        log_probs=[entry[0] for entry in sampled],
        meta_info=meta_info,
        text=output["text"],
    )
    return sample


async def generate_and_rm(args, sample, sampling_params: dict, evaluation: bool = False):
    """Generate one sample, or a list of siblings, and judge what has no reward yet."""
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length > 0:
        sample.loss_mask = [0] * sample.response_length
    if sample.status in _DONE:
        if sample.reward is None and not args.group_rm:
            raise AssertionError("a sample that is done has no reward")
        return sample
    state = GenerateState(args)
    async with state.semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        with state.dp_rank_context():
            sample = await _generated(args, sample, sampling_params, evaluation)
    sample = await apply_rollout_sample_hooks(args, sample, evaluation=evaluation)
    return sample if args.group_rm else await _judged(args, sample)


async def _generated(args, sample: Sample, sampling_params: dict, evaluation: bool):
    path = sample.generate_function_path or args.custom_generate_function_path
    function = generate if path is None else load_function(path)
    if "evaluation" in inspect.signature(function).parameters:
        return await function(args, sample, sampling_params, evaluation=evaluation)
    return await function(args, sample, sampling_params)


async def _judged(args, value):
    samples = value if isinstance(value, list) else [value]
    open_samples = [sample for sample in samples if sample.reward is None]
    if any(sample.status is Sample.Status.ABORTED for sample in samples) or not open_samples:
        return value
    if isinstance(value, list):
        rewards = await batched_async_rm(args, open_samples)
    else:
        rewards = [await async_rm(args, value)]
    for sample, reward in zip(open_samples, rewards, strict=True):
        sample.reward = reward
    return value


async def generate_and_rm_group(args, group: list, sampling_params: dict, evaluation: bool = False) -> list:
    """Generate and judge all samples of a group side by side."""
    state = GenerateState(args)
    if state.aborted:
        return group
    tasks = []
    for index, sample in enumerate(group):
        sample.session_id = sample.session_id or str(uuid.uuid4())
        params = dict(sampling_params)
        if getattr(args, "sglang_enable_deterministic_inference", False):
            params["sampling_seed"] = state.group_sampling_seeds[index]
        tasks.append(generate_and_rm(args, sample, params, evaluation=evaluation))
    group = await asyncio.gather(*tasks)
    if args.group_rm and not state.aborted:
        for sample, reward in zip(group, await batched_async_rm(args, group), strict=True):
            sample.reward = reward
    return group


async def generate_rollout_async(args, rollout_id: int, data_source):
    """Return a batch of groups that the filter keeps, and no aborted ones.

    ``data_source`` returns the next n groups of prompts. Groups that are not needed any more are cancelled.
    """
    state, metrics, kept, everything = GenerateState(args), MetricGatherer(), [], []
    path, size = args.dynamic_sampling_filter_path, args.rollout_batch_size
    keeps = load_function(path) if path is not None else None
    try:
        while len(kept) < size:
            while state.remaining_batch_size < size:
                state.submit_generate_tasks(data_source(args.over_sampling_batch_size))
            done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
            for group in [task.result() for task in done]:
                everything.append(group)
                output = call_dynamic_filter(keeps, args, group)
                if should_drop_dynamic_filter_output(
                    output, remaining_batch_size=state.remaining_batch_size, target_data_size=size
                ):
                    metrics.on_dynamic_filter_drop(output.reason)
                    state.remaining_batch_size -= 1
                elif len(kept) < size:
                    kept.append(group)
    finally:
        for task in state.pendings:
            task.cancel()
        await asyncio.gather(*state.pendings, return_exceptions=True)
        state.reset()
    kept.sort(key=_index)
    if args.rollout_sample_filter_path is not None:
        load_function(args.rollout_sample_filter_path)(args, kept)
    if args.rollout_all_samples_process_path is not None:
        everything.sort(key=_index)
        load_function(args.rollout_all_samples_process_path)(args, everything, data_source)
    return RolloutFnTrainOutput(kept, metrics.collect()), []


def _index(group: list) -> int:
    first = group[0]
    return (first[0] if isinstance(first, list) else first).index


async def eval_rollout(args, rollout_id: int):
    """Return what the policy gets for every set of ``args.eval_datasets``, and no aborted samples."""
    sets = [await eval_rollout_single_dataset(args, rollout_id, each) for each in args.eval_datasets]
    return RolloutFnEvalOutput({name: data for each in sets for name, data in each.items()}), []


async def eval_rollout_single_dataset(args, rollout_id: int, dataset_cfg) -> dict:
    """Return rewards, samples, and which of them were cut off, in the order of the prompts."""
    params = {
        **GenerateState(args).sampling_params,
        "temperature": dataset_cfg.temperature,
        "max_new_tokens": dataset_cfg.max_response_len,
    }
    episodes = []
    for row in samples_of(args, recipe_prompts(args, dataset_cfg.path)[: args.eval_max_prompts]):
        for _ in range(dataset_cfg.n_samples_per_eval_prompt):
            sample = copy.deepcopy(row)
            sample.index, sample.custom_rm_path = len(episodes), dataset_cfg.custom_rm_path
            episodes.append(generate_and_rm(args, sample, dict(params), evaluation=True))
    samples = []
    for episode in await asyncio.gather(*episodes):
        samples += episode if isinstance(episode, list) else [episode]
    truncated = [sample.status is Sample.Status.TRUNCATED for sample in samples]
    rewards = [sample.get_reward_value(args) for sample in samples]
    return {dataset_cfg.name: {"rewards": rewards, "truncated": truncated, "samples": samples}}


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    """Return a batch of groups, or what an evaluation has found."""
    if evaluation:
        return run(eval_rollout(args, rollout_id))[0]
    return run(generate_rollout_async(args, rollout_id, data_source.get_samples))[0]
