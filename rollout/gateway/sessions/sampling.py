"""Sampling parameters that the trainer cannot reproduce.

The trainer computes log-probs of the whole softmax at the recipe's temperature. A token that was sampled from
any other distribution has a log-prob that it cannot reproduce. Seeds, stops and lengths change no
distribution.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.configs.schema.sampling import NEUTRAL


@dataclass(frozen=True, slots=True)
class SamplingVerdict:
    """The sampling parameters of a request, and those that the trainer cannot reproduce."""

    sampling: Mapping[str, object]
    """The parameters that go to the engine."""
    reasons: tuple[str, ...]
    """The parameters that the trainer cannot reproduce."""
    overridden: bool = False
    """The recipe's parameters have taken the place of such ones."""


def judge_sampling(sampling: Mapping[str, object], temperature: float, *, override: bool) -> SamplingVerdict:
    """Return how a request is sampled, and why the trainer cannot reproduce it.

    A request without a temperature gets the recipe's, ``temperature``. ``override`` puts the recipe's
    parameters in place of those that the trainer cannot reproduce; no reasons are left.
    """
    sampling = dict(sampling)
    if sampling.get("temperature") is None:
        sampling["temperature"] = temperature
    reasons = ["temperature"] if sampling["temperature"] != temperature else []
    reasons += [
        name
        for name, neutral in NEUTRAL.items()
        if sampling.get(name) is not None and sampling[name] not in neutral
    ]
    if not override:
        return SamplingVerdict(sampling, tuple(reasons))
    for name in reasons:
        del sampling[name]
    sampling["temperature"] = temperature
    return SamplingVerdict(sampling, (), overridden=bool(reasons))
