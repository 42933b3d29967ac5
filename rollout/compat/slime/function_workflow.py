"""Episodes of a recipe whose rollout function collects whole batches."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, cast

import numpy as np

from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.episode_samples import (
    NothingSampled,
    SampleError,
    SampleLike,
    checked_mask,
    fields_of,
    finish_of,
    is_sampled,
    rewarded,
    trajectory_of,
)
from slipstream.rollout.compat.slime.rollout_calls import RolloutCalls, SampledEpisode
from slipstream.rollout.plugins import resolve
from slipstream.rollout.tokenizer import Tokenizer
from slipstream.rollout.trajectory import UNSAMPLED, Prompt, Trajectory
from slipstream.rollout.workflow import Place, WorkflowContext


class Attesting(Protocol):
    """The generator of an episode that others have asked the engines for: ``collector.recording``."""

    def attest(self, versions: Iterable[int]) -> None: ...


class FunctionWorkflow:
    """Has every episode made by the rollout function."""

    def __init__(
        self, calls: RolloutCalls, arguments: SlimeArguments, reward_key: str, version: Callable[[], int]
    ) -> None:
        """``version``: returns the policy version that the engines serve. Raises PluginError."""
        self._calls = calls
        self._arguments = arguments
        self._reward_key = reward_key
        self._version = version
        self._sample: Callable[..., SampleLike] = resolve("slime.utils.types.Sample")

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Sequence[Trajectory]:
        """Return the trajectories of one episode: as many as the function has made samples of it.

        Raises GroupRejected when the function drops the group.
        """
        place = context.place
        if place is None:
            raise TypeError("a rollout function evaluates whole sets: rollout.hooks.eval_function")
        made = await self._calls.episode(
            place, lambda number: self._made(prompt, place, number, context.tokenizer)
        )
        trajectories = [self._trajectory(sample, made, place) for sample in made.samples]
        runs = (run for trajectory in trajectories for run in trajectory.header.runs)
        versions = {version for version, _, _ in runs} - {UNSAMPLED}
        cast("Attesting", context.generator).attest(versions)
        return trajectories

    async def close(self) -> None:
        """Give up the call that runs."""
        await self._calls.close()

    def _made(self, prompt: Prompt, place: Place, number: int, tokenizer: Tokenizer) -> SampleLike:
        values = fields_of(prompt, self._arguments, tokenizer)
        index = place.group * self._arguments.n_samples_per_prompt + number
        return self._sample(**values | {"group_index": place.group, "index": index})

    def _trajectory(self, sample: SampleLike, made: SampledEpisode, place: Place) -> Trajectory:
        try:
            return trajectory_of(sample, made.replies, self._reward_key)
        except NothingSampled:
            if not sample.weight_versions or is_sampled(sample, made.untrained):
                raise
            return declared(sample, place.version, self._version(), self._reward_key)


def declared(sample: SampleLike, oldest: int, newest: int, reward_key: str) -> Trajectory:
    """Return the trajectory of a sample that no engine of the run has sampled here, of the policy versions
    that it declares. Where they are several, all of its tokens count as of the oldest one.

    ``oldest``: policy version at the admission of its group, ``newest``: the one that the engines serve.
    Raises SampleError for other versions, and without log-probs.
    """
    try:
        versions = [int(version) for version in sample.weight_versions]
    except (TypeError, ValueError):
        raise SampleError(
            f"weight_versions is {sample.weight_versions!r}, expected policy versions"
        ) from None
    if min(versions) < oldest or max(versions) > newest:
        raise SampleError(
            f"weight_versions is {versions}, expected versions from {oldest}, which the engines served when "
            f"its group was admitted, to {newest}: another age could not be bounded"
        )
    if sample.rollout_log_probs is None:
        raise SampleError(
            "the sample declares its weight_versions, but has no rollout_log_probs, expected one for each "
            "token of the response"
        )
    mask, size = checked_mask(sample), len(sample.tokens)
    start = size - sample.response_length
    loss_mask_T, logprobs_T = np.zeros(size, np.bool_), np.zeros(size, np.float32)
    versions_T = np.full(size, UNSAMPLED, np.int32)
    loss_mask_T[start:] = np.array(mask, np.bool_) & (not sample.remove_sample)
    logprobs_T[start:], versions_T[start:] = sample.rollout_log_probs, min(versions)
    versions_T[start:][~np.array(mask, np.bool_)] = UNSAMPLED  # written by tools
    logprobs_T[versions_T == UNSAMPLED] = 0.0
    trajectory = Trajectory(
        np.array(sample.tokens, np.int64), loss_mask_T, logprobs_T, versions_T, finish_of(sample)
    )
    return rewarded(trajectory, sample, reward_key)
