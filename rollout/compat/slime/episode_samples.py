"""Samples and trajectories: what hooks are given, and what is trained of what they return."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Protocol, cast

import numpy as np

from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.sample_matching import SampledReplies, match_sample
from slipstream.rollout.reward.value import Judgement, NoNumber, is_part_name, judgement_of
from slipstream.rollout.tokenizer import Tokenizer
from slipstream.rollout.trajectory import Finish, Prompt, Trajectory


class SampleStatus(Protocol):
    """A member of slime's `Sample.Status`."""

    @property
    def value(self) -> str: ...


class SampleLike(Protocol):
    """The fields of slime's `Sample` that are read here: a checkout has its own class."""

    index: int | None
    group_index: int | None
    rollout_id: int | None
    prompt: Any
    tokens: list[int]
    response: str
    response_length: int
    label: Any
    reward: Any
    loss_mask: list[int] | None
    rollout_log_probs: list[float] | None
    remove_sample: bool
    status: SampleStatus
    metadata: dict[str, Any]
    custom_rm_path: str | None
    weight_versions: list[str]


class WrongReturn(TypeError):
    """A hook has returned something else than its contract says."""


class SampleError(ValueError):
    """A hook has returned a sample that cannot be trained."""


class NothingSampled(SampleError):
    """No engine has sampled anything of a sample in its episode."""


class EpisodeEnded(SampleError):
    """A hook says that the episode was aborted or has failed: no policy is to be judged by it."""


DRAWN = "slime_samples"
"""Name in a prompt's metadata of what a data source has put on the samples of its group besides the prompt:
once for all of them, or for each."""


PARTS = "recipe_reward_parts"
"""Attribute of samples whose reward is a number: the parts that the recipe's own reward has given besides."""


def fields_of(prompt: Prompt, args: SlimeArguments, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the fields of the sample that an episode begins with."""
    text: object = prompt.prompt
    is_rendered = DRAWN in prompt.metadata and isinstance(text, str)  # by the data source
    if args.apply_chat_template and not is_rendered:
        text = tokenizer.apply_chat_template(
            prompt.messages(), tokenize=False, add_generation_prompt=True, **args.apply_chat_template_kwargs
        )
    return {
        "prompt": text,
        "label": prompt.label,
        "metadata": metadata_of(prompt),
        "group_index": prompt.id,
    }


def metadata_of(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt's metadata as hooks see them."""
    return {name: value for name, value in prompt.metadata.items() if name != DRAWN}


def drawn_onto(sample: SampleLike, prompt: Prompt, number: int) -> SampleLike:
    """Return the sample with what a data source has put on the one with this number in its group."""
    drawn = cast("Sequence[Mapping[str, Any]]", prompt.metadata.get(DRAWN) or ())
    if not drawn:
        return sample
    for name, value in drawn[number if len(drawn) > 1 else 0].items():
        if name == "status":
            sample.status = type(sample.status)(value)  # pyright: ignore[reportCallIssue]
        elif name not in ("spec_info", "prefix_cache_info"):
            setattr(sample, name, value)
    return sample


def is_done(sample: SampleLike) -> bool:
    """True if a sample has its response already: its data source has one of its own."""
    return sample.response_length > 0 and sample.status.value in ("completed", "truncated")


def trajectory_of(sample: SampleLike, replies: SampledReplies, reward_key: str) -> Trajectory:
    """Return the trajectory of a sample, with its reward if it has one.

    Only what an engine has sampled carries loss (``sample_matching``). Raises EpisodeEnded for one that was
    aborted or has failed, NothingSampled, and SampleError for one that contradicts itself or the engines.
    """
    if sample.status.value in ("aborted", "failed"):
        raise EpisodeEnded(f"the sample has the status {sample.status.value}: the episode does not count")
    mask = checked_mask(sample)
    start = len(sample.tokens) - sample.response_length
    match = match_sample(sample.tokens, start, replies, mask, sample.rollout_log_probs)
    if not match.sampled_T.any():
        raise NothingSampled(
            f"no engine has sampled any of the {sample.response_length} response tokens of the sample, in "
            f"{replies.count} replies of /generate that can be trained"
        )
    loss_mask_T = match.sampled_T.copy()
    loss_mask_T[start:] &= np.array(mask, np.bool_)
    if sample.remove_sample:
        loss_mask_T[:] = False
    trajectory = Trajectory(
        np.array(sample.tokens, np.int64),
        loss_mask_T,
        match.logprobs_T,
        match.versions_T,
        finish_of(sample),
        match.retractions,
    )
    return rewarded(trajectory, sample, reward_key)


def is_sampled(sample: SampleLike, replies: SampledReplies) -> bool:
    """True if the response holds something of the replies."""
    start = len(sample.tokens) - sample.response_length
    match = match_sample(sample.tokens, start, replies, checked_mask(sample), None)
    return bool(match.sampled_T.any())


def finish_of(sample: SampleLike) -> Finish:
    """Return how the last completion of a sample has ended."""
    return Finish.LENGTH if sample.status.value == "truncated" else Finish.STOP


def rewarded(trajectory: Trajectory, sample: SampleLike, reward_key: str) -> Trajectory:
    """Return the trajectory with the reward of its sample, if that has one. Raises SampleError."""
    if sample.reward is None:
        return trajectory
    judgement = judgement_of_reward(sample.reward, reward_key)
    return trajectory.judged(judgement.reward, judgement.parts or getattr(sample, PARTS, ()))


def checked_mask(sample: SampleLike) -> list[int]:
    """Return the loss mask of the response. Raises SampleError."""
    length = sample.response_length
    if not 0 < length <= len(sample.tokens):
        raise SampleError(f"response_length is {length}, but the sample has {len(sample.tokens)} tokens")
    mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    reported = sample.rollout_log_probs
    for name, values in (("loss_mask", mask), ("rollout_log_probs", reported)):
        if values is not None and len(values) != length:
            raise SampleError(f"{name} has {len(values)} values, but the response {length} tokens")
    if set(mask) - {0, 1}:
        raise SampleError(f"loss_mask holds {sorted(set(mask) - {0, 1})[:3]}, expected 0 and 1")
    return mask


def judgement_of_reward(value: object, reward_key: str) -> Judgement:
    """Return the judgement that a hook's reward stands for.

    Whatever a mapping holds beside numbers is left out: hooks put texts and lists there for their logs.
    Raises SampleError.
    """
    if isinstance(value, Mapping):
        values = cast("Mapping[object, object]", value)
        value = {name: each for name, each in values.items() if name == reward_key or _is_part(name, each)}
    try:
        return judgement_of(value, reward_key)
    except NoNumber as error:
        raise SampleError(f"the reward of a hook: {error}") from None


def _is_part(name: object, value: object) -> bool:
    return (
        isinstance(name, str)
        and is_part_name(name)
        and isinstance(value, float | int | np.floating | np.integer)
        and isfinite(cast("float", value))
    )
