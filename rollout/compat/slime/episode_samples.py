"""Samples and trajectories: what hooks are given, and what is trained of what they return."""

import copy
from collections.abc import Mapping, Sequence
from enum import Enum
from math import isfinite
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.sample_matching import SampledReplies, match_sample
from slipstream.rollout.reward.value import Judgement, NoNumber, is_part_name, judgement_of
from slipstream.rollout.tokens.teacher import TeacherScores
from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Messages, Prompt, Trajectory
from slipstream.rollout.workflow import WorkflowContext

_LONGEST_SHOWN = 80
"""Characters of a wrong value in an error."""


class SampleLike(Protocol):
    """The fields of slime's `Sample` that are read here: a checkout has its own class."""

    index: int | None
    group_index: int | None
    rollout_id: int | None
    prompt: str | Messages
    tokens: list[int]
    response: str
    response_length: int
    label: object
    reward: object
    loss_mask: list[int] | None
    rollout_log_probs: list[float] | None
    teacher_log_probs: object
    remove_sample: bool
    status: Enum
    metadata: dict[str, object]
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


def fields_of(prompt: Prompt, args: SlimeArguments, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the fields of the sample that an episode begins with."""
    text: object = prompt.prompt
    is_rendered = DRAWN in prompt.metadata and isinstance(text, str)  # by the data source
    if args.apply_chat_template and not is_rendered:
        text = tokenizer.apply_chat_template(
            prompt.messages(), tokenize=False, add_generation_prompt=True, **args.apply_chat_template_kwargs
        )
    fields: dict[str, object] = {
        "prompt": text,
        "label": prompt.label,
        "metadata": metadata_of(prompt),
        "group_index": prompt.id,
    }
    # Hooks write into what they are given, and the prompt is that of all episodes of a group.
    return copy.deepcopy(fields)


def metadata_of(prompt: Prompt) -> dict[str, object]:
    """Return a prompt's metadata as hooks see them."""
    return {name: value for name, value in prompt.metadata.items() if name != DRAWN}


def drawn_onto(sample: SampleLike, prompt: Prompt, number: int) -> SampleLike:
    """Return the sample with what a data source has put on the one with this number in its group."""
    drawn = cast("Sequence[Mapping[str, object]]", prompt.metadata.get(DRAWN) or ())
    if not drawn:
        return sample
    for name, value in drawn[number if len(drawn) > 1 else 0].items():
        if name == "status":
            sample.status = type(sample.status)(value)
        elif name not in ("spec_info", "prefix_cache_info"):
            setattr(sample, name, value)
    return sample


def is_done(sample: SampleLike) -> bool:
    """True if a sample has its response already: its data source has one of its own."""
    return sample.response_length > 0 and sample.status.value in ("completed", "truncated")


class Response(NamedTuple):
    """The tokens of a sample, of which the response is the end."""

    tokens: list[int]
    start: int
    """Index of the first token of the response."""
    mask: list[int]
    """1 where the hook wants loss, 0 elsewhere, over the response."""
    logprobs: list[float] | None
    """Log-probs that the hook reports, over the response; None: it reports none."""


def trajectory_of(
    sample: SampleLike,
    replies: SampledReplies,
    reward_key: str,
    *,
    has_teacher: bool = False,
    owner: int | None = None,
) -> Trajectory:
    """Return the trajectory of a sample, with its reward if it has one.

    Only what an engine has sampled carries loss (``sample_matching``). ``has_teacher``: the recipe trains
    towards a teacher, whose log-probs are ``teacher_log_probs``; otherwise the field is the hooks' own.
    ``owner``: the group of the sample, where the replies are those of several.

    Raises EpisodeEnded for one that was aborted or has failed, NothingSampled, LogprobsDiffer, and
    SampleError for one that contradicts itself.
    """
    finish = finish_of(sample)
    tokens, start, mask, reported = response_of(sample)
    match = match_sample(tokens, start, replies, mask, reported, owner)
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
        np.array(tokens, np.int64),
        loss_mask_T,
        match.logprobs_T,
        match.versions_T,
        finish,
        match.retractions,
        teacher=_teacher_scores(sample, start, match.sampled_T) if has_teacher else None,
    )
    return rewarded(trajectory, sample, reward_key)


def is_sampled(sample: SampleLike, replies: SampledReplies) -> bool:
    """True if the response holds something of the replies."""
    tokens, start, mask, _ = response_of(sample)
    return bool(match_sample(tokens, start, replies, mask, None).sampled_T.any())


def finish_of(sample: SampleLike) -> Finish:
    """Return how the last completion of a sample has ended. Raises EpisodeEnded, and SampleError."""
    status = getattr(sample.status, "value", None)
    if status is None:
        raise SampleError(f"status is {sample.status!r}, expected a member of Sample.Status")
    if status in ("aborted", "failed"):
        raise EpisodeEnded(f"the sample has the status {status}: the episode does not count")
    return Finish.LENGTH if status == "truncated" else Finish.STOP


def rewarded(trajectory: Trajectory, sample: SampleLike, reward_key: str) -> Trajectory:
    """Return the trajectory with the reward of its sample, if that has one. Raises SampleError."""
    if sample.reward is None:
        return trajectory
    judgement = judgement_of_reward(sample.reward, reward_key)
    return trajectory.judged(judgement.reward, judgement.parts or getattr(sample, PARTS, ()))


def _teacher_scores(sample: SampleLike, start: int, sampled_T: npt.NDArray[np.bool_]) -> TeacherScores | None:
    """Return the teacher's log-probs of the tokens that were sampled; None: no hook has set any.

    ``start``: index of the first token of the response. Raises SampleError.
    """
    if sample.teacher_log_probs is None:
        return None
    try:
        logp_R = np.asarray(sample.teacher_log_probs, np.float32).reshape(-1)
    except (TypeError, ValueError) as error:
        raise SampleError(f"teacher_log_probs holds no numbers: {error}") from None
    if len(logp_R) != sample.response_length:
        raise SampleError(
            f"teacher_log_probs has {len(logp_R)} values, but the response {sample.response_length} tokens"
        )
    logp_T = np.full(len(sampled_T), np.nan, np.float32)
    logp_T[start:] = logp_R
    logp_T[~sampled_T] = np.nan
    try:
        return TeacherScores(logp_T)
    except ValueError as error:
        raise SampleError(f"teacher_log_probs: {error}") from None


def _token_ids(sample: SampleLike) -> list[int]:
    """Return the token ids, which hooks may hold in a list, an array or a tensor. Raises SampleError."""
    try:
        ids_T = np.asarray(sample.tokens)
    except (TypeError, ValueError) as error:
        raise SampleError(f"tokens are no token ids: {error}") from None
    if ids_T.ndim != 1 or ids_T.dtype.kind not in "iu" or ids_T.min(initial=0) < 0:
        raise SampleError(f"tokens are {_shown(sample.tokens)}, expected token ids")
    return ids_T.tolist()


def response_of(sample: SampleLike) -> Response:
    """Return what a sample says of its response. Raises SampleError for what contradicts itself."""
    tokens, length = _token_ids(sample), cast("object", sample.response_length)
    if not isinstance(length, int) or not 0 < length <= len(tokens):
        raise SampleError(f"response_length is {length}, but the sample has {len(tokens)} tokens")
    mask = [1] * length if sample.loss_mask is None else _listed("loss_mask", sample.loss_mask, length)
    reported = sample.rollout_log_probs
    logprobs = None if reported is None else _listed("rollout_log_probs", reported, length)
    wrong = [value for value in mask if value not in (0, 1)]
    if wrong:
        raise SampleError(f"loss_mask holds {wrong[:3]}, expected 0 and 1")
    return Response(tokens, len(tokens) - length, [int(value) for value in mask], logprobs)


def _listed(name: str, values: object, length: int) -> list[float]:
    """Return one number for each token of the response as a list; NaN for None. Raises SampleError."""
    try:
        numbers: list[float] = np.asarray(values, np.float64).reshape(-1).tolist()
    except (TypeError, ValueError):
        raise SampleError(f"{name} is {_shown(values)}, expected numbers") from None
    if len(numbers) != length:
        raise SampleError(f"{name} has {len(numbers)} values, but the response {length} tokens")
    return numbers


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


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


def attest(context: WorkflowContext, trajectories: Sequence[Trajectory]) -> None:
    """Let the record of an episode accept trajectories that were not sampled by its own requests."""
    runs = (run for trajectory in trajectories for run in trajectory.header.runs)
    versions = {version for version, _, _ in runs} - {UNSAMPLED}
    cast("Any", context.generator).attest(versions)  # a ``collector.recording.Recording``


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
