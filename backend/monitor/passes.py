"""avg@n and pass@k: what several samples of each prompt say together."""

import math
from collections.abc import Sequence

from slipstream.rollout.tokens.named_numbers import mean

PASSED = 1.0
"""Reward from which a sample passes."""


def by_prompt(rewards: Sequence[float], samples: int) -> list[Sequence[float]]:
    """Return the rewards of each prompt. ``rewards``: ``samples`` of each prompt in a row."""
    return [rewards[start : start + samples] for start in range(0, len(rewards), samples)]


def passes(rewards: Sequence[float], samples: int) -> dict[int, float]:
    """Return ``pass@k`` by k: the chance that at least one of k samples of a prompt passes.

    ``rewards``: ``samples`` of each prompt in a row. k goes in powers of two up to ``samples``.
    """
    passing = [sum(reward >= PASSED for reward in each) for each in by_prompt(rewards, samples)]
    return {k: mean([pass_at(k, samples, passed) for passed in passing]) for k in powers_to(samples)}


def pass_at(k: int, samples: int, passed: int) -> float:
    """Return the chance that one of k samples passes, drawn from ``samples`` of which ``passed`` do.

    Unbiased: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, equation 1).
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def powers_to(samples: int) -> list[int]:
    """Return 1, 2, 4, ... and ``samples``."""
    return sorted({samples, *(2**power for power in range(samples.bit_length()) if 2**power <= samples)})
