"""Samples that no engine of the run has sampled: they declare the policy versions that have."""

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import numpy as np

from slipstream.rollout.compat.slime.episode_samples import (
    SampleError,
    SampleLike,
    finish_of,
    response_of,
    rewarded,
)
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Trajectory
from slipstream.rollout.workflow import WorkflowContext


class Attesting(Protocol):
    """The generator of an episode that others have asked the engines for: ``collector.recording``."""

    def attest(self, versions: Iterable[int]) -> None: ...


def attest(context: WorkflowContext, trajectories: Sequence[Trajectory]) -> None:
    """Let the record of an episode accept trajectories that were not sampled by its own requests."""
    runs = (run for trajectory in trajectories for run in trajectory.header.runs)
    versions = {version for version, _, _ in runs} - {UNSAMPLED}
    cast("Attesting", context.generator).attest(versions)


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
    tokens, start, mask, logprobs = response_of(sample)
    if logprobs is None:
        raise SampleError(
            "the sample declares its weight_versions, but has no rollout_log_probs, expected one for each "
            "token of the response"
        )
    size, wanted = len(tokens), np.array(mask, np.bool_)
    loss_mask_T, logprobs_T = np.zeros(size, np.bool_), np.zeros(size, np.float32)
    versions_T = np.full(size, UNSAMPLED, np.int32)
    loss_mask_T[start:] = wanted & (not sample.remove_sample)
    logprobs_T[start:] = np.where(wanted, logprobs, 0.0)
    versions_T[start:][wanted] = min(versions)  # tools have written the rest
    trajectory = Trajectory(
        np.array(tokens, np.int64), loss_mask_T, logprobs_T, versions_T, finish_of(sample)
    )
    return rewarded(trajectory, sample, reward_key)
