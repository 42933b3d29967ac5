"""The sampling parameters of one engine request, under SGLang's names.

Workflows sample as the recipe says (``SamplingConfig``), clients of an endpoint as they ask
(``LiveSampling``): users, and the agents of episodes.

A completion that is interrupted goes on as a further request, whose prompt ends with the tokens so far. To
that request they are prompt: SGLang's penalties count none of them, and ``min_new_tokens`` and
``max_new_tokens`` are reduced by their number. A stop text that begins before the interruption and ends after
it is not found. A grammar cannot be entered in its middle, so that a completion under a grammar starts over.

``violations`` is the one check of values that every completion passes, whoever asks for it. SGLang checks
some of them itself. It computes in float32 and int32, and its scheduler ends, with all requests, when a logit
is not a number, when no token is left to sample, or when a number does not fit.
"""

import math
import re
import re._parser as regex_parser  # pyright: ignore  # SGLang reads stop expressions with it
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.grammars import GRAMMARS, grammar_violations

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
    request: str = ""
    """Who asks, for messages: the id of the request, and the name of its key."""

    @property
    def told(self) -> bytes:
        """Everything but the length, which may depend on other requests."""
        return msgspec.json.encode([self.parameters, self.top_logprobs], enc_hook=repr, order="deterministic")

    @property
    def starts_over(self) -> bool:
        """True if an interrupted completion starts over instead of going on."""
        return any(self.parameters.get(name) for name in GRAMMARS)


Sampling = SamplingConfig | LiveSampling


def starts_over(sampling: Sampling) -> bool:
    """True if an interrupted completion starts over instead of going on."""
    if isinstance(sampling, LiveSampling):
        return sampling.starts_over
    return bool(sampling.args) and any(sampling.args.get(name) for name in GRAMMARS)


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


# ---- values

LEAST = 1e-6
"""Smallest `top_p`, and smallest `temperature` but 0. SGLang takes a smaller one for 0."""

MOST_TEMPERATURE = 100.0
MOST_BIAS = 100.0
"""Largest logit bias, either way, as OpenAI has it. Minus infinity for all tokens would leave none."""

RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, MOST_TEMPERATURE),
    "top_p": (LEAST, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 2.0),  # logits are divided by it
}
"""Smallest and largest value of the parameters that SGLang computes with in float32."""

MOST_TOP_K = 1 << 30
"""SGLang keeps `top_k` in int32. This value, or -1, is the whole vocabulary."""

MOST_STOPS = 32
LONGEST_STOP = 256
"""Number of stop texts, and of stop expressions, and bytes of each. All are looked for after each token."""

MOST_STOP_TOKENS = 64


def violations(parameters: Mapping[str, object], vocab_size: int) -> list[str]:
    """Return what is wrong with the values of sampling parameters under SGLang's names; empty: nothing.

    A parameter that is missing or None has SGLang's default.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    return [
        *_numbers_out_of_range(given),
        *_bias_violations(given.get("logit_bias"), vocab_size),
        *_stop_violations(given, vocab_size),
        *_grammar_violations(given),
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers_out_of_range(given: Mapping[str, object]) -> Iterator[str]:
    for name, (least, most) in RANGES.items():
        value: Any = given.get(name)
        if value is not None and not (_is_number(value) and least <= value <= most):  # NaN is not
            yield f"{name}: expected a number from {least:g} to {most:g}, found {_shown(value)}"
        elif name == "temperature" and value is not None and 0 < value < LEAST:
            yield f"temperature: expected 0, or a number from {LEAST:g} on, found {value}"
    top_k: Any = given.get("top_k")
    if top_k is not None and not (isinstance(top_k, int) and (top_k == -1 or 1 <= top_k <= MOST_TOP_K)):
        yield f"top_k: expected -1, or a whole number from 1 to {MOST_TOP_K}, found {_shown(top_k)}"


def _bias_violations(bias: Any, vocab_size: int) -> Iterator[str]:
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        yield f"logit_bias: expected an object of numbers by token id, found {_shown(bias)}"
        return
    for token, value in cast("Mapping[object, object]", bias).items():
        if not (str(token).isdecimal() and int(str(token)) < vocab_size):
            yield f"logit_bias: expected token ids below {vocab_size}, found {_shown(token)}"
            return
        if not (_is_number(value) and abs(cast(float, value)) <= MOST_BIAS):
            yield (
                f"logit_bias of token {token}: expected a number from {-MOST_BIAS:g} to {MOST_BIAS:g}, found "
                f"{_shown(value)}"
            )
            return


def _stop_violations(given: Mapping[str, object], vocab_size: int) -> Iterator[str]:
    for name in ("stop", "stop_regex"):
        value: Any = given.get(name, ())
        texts: Any = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            yield f"{name}: expected a text or a list of texts, found {_shown(value)}"
            continue
        if len(texts) > MOST_STOPS:
            yield f"{name}: expected at most {MOST_STOPS} texts, found {len(texts)}"
        longest = max((len(text.encode(errors="replace")) for text in texts), default=0)
        if longest > LONGEST_STOP:
            yield f"{name}: expected texts of at most {LONGEST_STOP} bytes, found one of {longest}"
        elif name == "stop_regex":
            yield from (problem for text in texts if (problem := _slow(text)))
    ids: Any = given.get("stop_token_ids", ())
    if not isinstance(ids, list | tuple | set | frozenset) or not all(
        isinstance(token, int) and 0 <= token < vocab_size for token in ids
    ):
        yield f"stop_token_ids: expected token ids from 0 to {vocab_size - 1}, found {_shown(ids)}"
        return
    most = min(MOST_STOP_TOKENS, vocab_size // 2)  # `min_new_tokens` takes them all out of the distribution
    if len(ids) > most:
        yield f"stop_token_ids: expected at most {most}, found {len(ids)}"


def _slow(expression: str) -> str | None:
    """Return why a stop expression must not be looked for; None: it is fine.

    SGLang's scheduler searches the end of the text for it after each token, with Python's ``re``, which has
    no limit of time and tries every way in which the repetitions and choices of an expression can go. An
    expression without a greatest length has it search all of the text.
    """
    try:
        ways = _ways(regex_parser.parse(expression))
    except (re.error, RecursionError, OverflowError) as error:
        return f"stop_regex: {_shown(expression)} is no expression of Python's re: {error}"
    if ways > MOST_WAYS:
        return (
            f"stop_regex: {_shown(expression)} can take too long: expected repetitions and choices that can "
            f"go in at most {MOST_WAYS} ways; give each repetition an upper bound, such as {{1,20}}"
        )
    return None


MOST_WAYS = 1000
"""Ways in which the repetitions and choices of a stop expression may go."""

_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def _ways(tree: Any) -> float:
    """Return an upper bound of the number of ways in which an expression can be matched at one place."""
    ways = 1.0
    for operation, argument in tree:
        if str(operation) in _REPEATS:
            least, most, inner = argument
            if most == regex_parser.MAXREPEAT:
                return math.inf
            ways *= (most - least + 1) * min(_ways(inner), MOST_WAYS + 1.0) ** min(most, 99)
        elif str(operation) == "BRANCH":
            ways *= sum(_ways(branch) for branch in argument[1])
        else:
            for part in _parts(argument):
                ways *= _ways(part)
    return ways


def _parts(argument: Any) -> Iterator[Any]:
    """Yield the expressions inside of an argument of an operation."""
    if isinstance(argument, regex_parser.SubPattern):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in cast("list[Any]", argument):
            yield from _parts(part)


def _grammar_violations(given: Mapping[str, object]) -> Iterator[str]:
    names = [name for name in GRAMMARS if given.get(name)]
    if len(names) > 1:
        yield f"expected one grammar, found {' and '.join(names)}"
    if names and given.get("min_new_tokens"):
        # At the end of its text a grammar allows only the end token, which the least length rules out.
        yield f"min_new_tokens: cannot be given together with {names[0]}"
    for name in names:
        yield from (f"{name}: {problem}" for problem in grammar_violations(name, given[name]))


def _shown(value: object) -> str:
    """Return the beginning of a value, for messages."""
    text = repr(value) if isinstance(value, int | float | str) else type(value).__name__
    return text if len(text) <= 60 else text[:60] + "..."
