"""An episode of slime's hooks as a workflow.

sample ──► custom_generate ──► rollout_sample_hook ... ──► custom_rm ──► trajectories
             │        ▲
             ▼        │ POST /generate
          endpoint of the episode: what was sampled decides what is trained

A hook writes its own URLs, ``http://{args.sglang_router_ip}:{args.sglang_router_port}/generate``. The key of
the episode stands in front of the host, as ``user:key@host``: clients send it as basic authentication.
"""

import inspect
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from slipstream.configs.schema import HooksConfig
from slipstream.rollout.compat.slime.arguments import SlimeArguments, address, prepare_requests
from slipstream.rollout.compat.slime.episode_samples import (
    SampleLike,
    WrongReturn,
    attest,
    declared,
    drawn_onto,
    fields_of,
    is_done,
    trajectory_of,
)
from slipstream.rollout.compat.slime.group_hooks import Hook, ReturnedSamples
from slipstream.rollout.compat.slime.sample_matching import SampledReplies
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.tokens.trajectory import Finish, Prompt, Trajectory
from slipstream.rollout.workflow import WorkflowContext
from slipstream.rollout.workflow.endpoint import Reply

log = logging.getLogger(__name__)


class HookWorkflow:
    """Runs episodes of the recipe's hooks. ``slime`` must be importable (``alias_path``)."""

    def __init__(
        self,
        arguments: SlimeArguments,
        hooks: HooksConfig,
        reward_key: str,
        returned: ReturnedSamples,
        version: Callable[[], int],
        *,
        has_teacher: bool = False,
    ) -> None:
        """``arguments``: of which every episode gets a copy. ``reward_key``: ``rollout.reward_key``.
        ``returned``: keeps the samples for hooks that see whole groups. ``version``: returns the policy
        version that the engines serve. ``has_teacher``: samples may have a teacher's log-probs, towards which
        the recipe trains.

        Raises PluginError.
        """
        self._arguments = arguments
        self._hooks = hooks
        self._reward_key = reward_key
        self._returned = returned
        self._version = version
        self._has_teacher = has_teacher
        self._sample: Callable[..., SampleLike] = resolve("slime.utils.types.Sample")
        path = hooks.custom_generate_function
        self._generate: Hook | None = resolve(path) if path is not None else None
        self._apply_hooks: Hook = resolve("slime.rollout.sample_hooks.apply_rollout_sample_hooks")
        self._rm: Hook = resolve("slime.rollout.rm_hub.async_rm")
        self._batched_rm: Hook = resolve("slime.rollout.rm_hub.batched_async_rm")
        self._numbers = itertools.count()
        prepare_requests(arguments)

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Sequence[Trajectory]:
        """Return the trajectories of one episode: as many as the generate function returns samples."""
        args = self._arguments.copied()
        sample = self._sample(**fields_of(prompt, args, context.tokenizer), index=next(self._numbers))
        if (place := context.place) is not None:
            sample = drawn_onto(sample, prompt, place.sample)
            if is_done(sample):
                samples = await self._finished(args, sample, context)
                newest = self._version()
                trajectories = [declared(each, place.version, newest, self._reward_key) for each in samples]
                attest(context, trajectories)
                return trajectories
        if context.endpoint is None:
            replies = await self._complete(sample, prompt, context)
            samples = await self._finished(args, sample, context)
        else:
            async with context.endpoint.open() as endpoint:
                address(args, endpoint)
                samples, replies = await endpoint.run(self._asked(args, sample, prompt, context))
                if self._generate is not None:
                    replies = endpoint.replies()
        sampled = SampledReplies(replies)
        trajectories = [self._trajectory(sample, sampled) for sample in samples]
        self._returned.keep(prompt, trajectories, samples)
        return trajectories

    async def _asked(
        self, args: SlimeArguments, sample: SampleLike, prompt: Prompt, context: WorkflowContext
    ) -> tuple[list[SampleLike], Sequence[Reply]]:
        """Return the samples of an episode with an endpoint, and what was sampled without it."""
        if self._generate is None:
            replies = await self._complete(sample, prompt, context)
            return await self._finished(args, sample, context), replies
        value = await self._generated(self._generate, args, sample, context)
        return await self._finished(args, value, context), []

    async def _complete(self, sample: SampleLike, prompt: Prompt, context: WorkflowContext) -> list[Reply]:
        """Continue the prompt with one completion, as slime's own generate function does."""
        ids = _prompt_ids(prompt, sample, context.tokenizer)
        completion = await context.generator.generate(ids, context.sampling)
        sample.tokens = [*ids, *completion.tokens]
        sample.response_length = len(completion.tokens)
        sample.response = context.tokenizer.decode(completion.tokens, skip_special_tokens=False)
        sample.loss_mask = [1] * len(completion.tokens)
        sample.rollout_log_probs = list(completion.logprobs)
        sample.status = type(sample.status)(
            "truncated" if completion.finish is Finish.LENGTH else "completed"
        )
        return [Reply(tuple(ids), completion)]

    async def _generated(
        self, generate: Hook, args: SlimeArguments, sample: SampleLike, context: WorkflowContext
    ) -> object:
        params = {
            **_sampling_params(args),
            "max_new_tokens": context.sampling.max_new_tokens,
            "temperature": context.sampling.temperature,
        }
        if "evaluation" in inspect.signature(generate).parameters:
            return await cast(
                "Awaitable[object]", generate(args, sample, params, evaluation=context.is_evaluation)
            )
        return await cast("Awaitable[object]", generate(args, sample, params))

    async def _finished(
        self, args: SlimeArguments, value: object, context: WorkflowContext
    ) -> list[SampleLike]:
        """Return the samples of an episode, through the recipe's hooks and with their rewards."""
        self._samples_in(value)
        value = await self._apply_hooks(args, value, rollout_id=None, evaluation=context.is_evaluation)
        samples = self._samples_in(value)
        is_judged = self._hooks.custom_rm is not None or self._hooks.rm_type is not None
        is_judged = is_judged or any(sample.custom_rm_path for sample in samples)
        left = [sample for sample in samples if sample.reward is None]
        if self._hooks.group_rm or not is_judged or not left:
            return samples
        if any(sample.status.value == "aborted" for sample in samples):
            return samples
        if isinstance(value, list):
            rewards = cast("Sequence[object]", await self._batched_rm(args, left))
            if len(rewards) != len(left):
                raise WrongReturn(
                    f"{self._hooks.custom_rm} returned {len(rewards)} rewards for {len(left)} samples"
                )
        else:
            rewards = [await self._rm(args, left[0])]
        for sample, reward in zip(left, rewards, strict=True):
            sample.reward = reward
        return samples

    def _samples_in(self, value: object) -> list[SampleLike]:
        """Return what a generate function has returned, one sample or a list of them, as a list."""
        samples = cast("list[object]", value if isinstance(value, list) else [value])
        kind = cast("type", self._sample)
        if not samples or not all(isinstance(sample, kind) for sample in samples):
            returned = ", ".join(sorted({type(sample).__name__ for sample in samples})) or "an empty list"
            raise WrongReturn(
                f"{self._hooks.custom_generate_function} returned {returned}, expected a Sample or a list "
                "of them"
            )
        return cast("list[SampleLike]", samples)

    def _trajectory(self, sample: SampleLike, replies: SampledReplies) -> Trajectory:
        trajectory = trajectory_of(sample, replies, self._reward_key, has_teacher=self._has_teacher)
        asked = sum(sample.loss_mask) if sample.loss_mask is not None else sample.response_length
        if not sample.remove_sample and trajectory.response_length < asked:
            log.debug(
                "%d of %d tokens that %s wants to train were sampled by no engine and carry no loss",
                asked - trajectory.response_length,
                asked,
                self._hooks.custom_generate_function,
            )
        return trajectory


def _prompt_ids(prompt: Prompt, sample: SampleLike, tokenizer: Tokenizer) -> list[int]:
    if isinstance(sample.prompt, str):
        encode = cast("Any", tokenizer).encode
        return list(encode(sample.prompt, add_special_tokens=False))
    return list(
        tokenizer.apply_chat_template(prompt.messages(), add_generation_prompt=True, return_dict=False)
    )


def _sampling_params(args: SlimeArguments) -> dict[str, object]:
    """Return the sampling parameters that hooks send with their requests, which they may change."""
    return {
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
