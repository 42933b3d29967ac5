"""The sampling parameters of one engine request, under SGLang's names.

Workflows sample as the recipe says (``SamplingConfig``), clients of an endpoint as they ask
(``LiveSampling``): users, and the agents of episodes.

A completion that is interrupted goes on as a further request, whose prompt ends with the tokens so far. To
that request they are prompt: SGLang's penalties count none of them, and ``min_new_tokens`` and
``max_new_tokens`` are reduced by their number. A stop text that begins before the interruption and ends after
it is not found. A grammar cannot be entered in its middle, so that a completion under a grammar starts over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from slipstream.configs.schema import SamplingConfig

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Parameters that constrain a completion to a grammar, which SGLang begins with the first new token."""

BEGUN = 1
"""Added to the priority of a live request that goes on: its user reads already, and others wait to begin. So
small a difference lets no request take the place of a running one."""


@dataclass(frozen=True, slots=True)
class LiveSampling:
    """How the request of a client is sampled."""

    max_new_tokens: int
    parameters: Mapping[str, object]
    """All other sampling parameters."""
    priority: int
    """Engines take waiting requests in the order of falling priority. Rollouts have 0, which is not sent:
    engines that serve no users refuse priorities."""
    top_logprobs: int = 0
    """Number of alternatives to report for each token."""

    @property
    def starts_over(self) -> bool:
        """True if an interrupted completion starts over instead of going on."""
        return any(self.parameters.get(name) for name in GRAMMARS)


Sampling = SamplingConfig | LiveSampling


def starts_over(sampling: Sampling) -> bool:
    """True if an interrupted completion starts over instead of going on."""
    if isinstance(sampling, LiveSampling):
        return sampling.starts_over
    return any(sampling.args.get(name) for name in GRAMMARS)


def request_fields(
    sampling: Sampling,
    *,
    done: int,
    tokens_left: int,
    greedy: bool,
    stream_interval: int,
    scores_prompt: bool = False,
) -> dict[str, object]:
    """Return the fields of a request that say how it is sampled and queued.

    ``done``: number of tokens that the completion has already. ``tokens_left``: number that may follow.
    ``scores_prompt``: the reply has the log-probs of the prompt. SGLang repeats them in each chunk, so that
    there are fewer chunks then.
    """
    if isinstance(sampling, SamplingConfig):
        parameters: dict[str, object] = {
            "temperature": 0.0 if greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": tokens_left,
            "stream_interval": stream_interval,
        }
        further = {
            "min_new_tokens": max(0, sampling.min_new_tokens - done),
            "stop": sampling.stop,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": sampling.ignore_eos,
        }
        parameters |= {name: value for name, value in further.items() if value}
        if sampling.seed is not None:
            parameters["sampling_seed"] = sampling.seed
        return {"sampling_params": parameters | sampling.args}
    is_live = sampling.priority > 0
    interval = stream_interval if scores_prompt or not is_live else 1
    parameters = {"stream_interval": interval, **sampling.parameters, "max_new_tokens": tokens_left}
    if greedy:
        parameters["temperature"] = 0.0
    if done and parameters.get("min_new_tokens"):
        parameters["min_new_tokens"] = max(0, cast(int, parameters["min_new_tokens"]) - done)
    fields: dict[str, object] = {"sampling_params": parameters}
    if is_live:
        fields["priority"] = sampling.priority + BEGUN * bool(done)
    if sampling.top_logprobs:
        fields["top_logprobs_num"] = sampling.top_logprobs
    if scores_prompt:
        fields["logprob_start_len"] = 0
    return fields
