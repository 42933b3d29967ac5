"""A ``custom_rm`` for on-policy distillation from a teacher that an SGLang server of the user's serves.

slime splits this between ``slime.rollout.on_policy_distillation.reward_func``, which returns the server's
reply as the reward, and ``post_process_rewards``, which reads the reply when the whole batch is there. Here
the log-probs belong to a sample before it is recorded, so that one function does both.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast

from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.episode_samples import SampleLike
from slipstream.rollout.system.plugins import resolve

TASK_REWARD = 0.0
"""Reward of a sample whose only signal is the teacher, as in slime."""


class WrongReply(RuntimeError):
    """The teacher's server does not say how likely each token of a response is."""


async def taught_by_server(args: SlimeArguments, sample: SampleLike | list[SampleLike]) -> object:
    """Set ``teacher_log_probs`` of a sample, or of each of several, and return the reward 0 for each.

    The server is asked at ``args.rm_url`` (``rollout.hooks.rm_url``): the address of SGLang's ``/generate``.
    Raises WrongReply, and what a failed request raises; either is a failed attempt at the episode.
    """
    if isinstance(sample, list):
        return [await taught_by_server(args, each) for each in sample]
    payload = {
        "input_ids": list(sample.tokens),
        "sampling_params": {
            "temperature": args.rollout_temperature,
            "max_new_tokens": 0,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    post = cast(
        Callable[[str, Mapping[str, object]], Awaitable[object]], resolve("slime.utils.http_utils.post")
    )  # of the alias, or of a checkout of slime
    reply = await post(args.rm_url, payload)
    sample.teacher_log_probs = _log_probs(reply, len(sample.tokens), sample.response_length)
    return TASK_REWARD


def _log_probs(reply: object, tokens: int, response: int) -> list[float]:
    """Return the log-probs of the last ``response`` of ``tokens`` tokens. Raises WrongReply."""
    meta = cast("Mapping[str, object]", reply).get("meta_info") if isinstance(reply, Mapping) else None
    entries = (
        cast("Mapping[str, object]", meta).get("input_token_logprobs") if isinstance(meta, Mapping) else None
    )
    if not isinstance(entries, Sequence) or len(cast("Sequence[object]", entries)) != tokens:
        shown = (
            f"{len(cast('Sequence[object]', entries))} of them" if isinstance(entries, Sequence) else "none"
        )
        raise WrongReply(
            f"rollout.hooks.rm_url: expected the log-probs of {tokens} tokens in "
            f"meta_info.input_token_logprobs, found {shown}: expected the address of SGLang's /generate, of "
            "a teacher with the policy's vocabulary"
        )
    # The first token of the whole has no log-prob, and is never one of the response.
    of_response = cast("Sequence[Sequence[object]]", entries)[tokens - response :]
    values = [entry[0] for entry in of_response if isinstance(entry[0], int | float)]
    if len(values) < len(of_response):
        raise WrongReply(
            "rollout.hooks.rm_url: a token of the response has no log-prob in the server's reply"
        )
    return list(map(float, values))
