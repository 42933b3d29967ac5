"""Averages over a mini-batch: means over tokens, episodes or prompts, and sums over tokens of episodes."""

from typing import Literal

import numpy as np

Averaging = Literal["token", "sequence", "prompt", "constant"]


def token_shares(
    averaging: Averaging,
    tokens_N: np.ndarray,
    group_N: np.ndarray,
    episode_N: np.ndarray,
    *,
    length: int | None = None,
) -> np.ndarray:
    """Return the weight of each trajectory's tokens in a mean over all tokens of a mini-batch, float32 [N].

    The trainer sums token losses, and Megatron divides the gradient by the number T of tokens of the
    mini-batch on all ranks. With these weights the result is, for ``tokens_N`` tokens that carry loss,

        token:     mean over tokens                                         1
        sequence:  mean over episodes of the mean over all of their tokens  T / (episodes * own tokens)
        prompt:    mean over prompts of the mean over all of their tokens   T / (prompts * own tokens)
        constant:  mean over episodes of the sum over their tokens / L      T / (episodes * L)

    where "own tokens" are those of the episode or of the prompt; most episodes are one trajectory. The arrays
    must hold all trajectories of the mini-batch, those of other micro-batches and ranks included. An episode
    without tokens does not count, except with ``constant``, whose divisor depends on no length. Tokens that a
    correction drops still count in the means.

    ``length``: L, which ``constant`` needs and the others leave alone. ``constant`` is the loss of Dr. GRPO
    (arXiv:2503.20783, section 3.2 and listing 1), whose code takes the largest length of a response as L.
    """
    if averaging == "token":
        return np.ones(len(tokens_N), np.float32)
    if averaging == "constant":
        share = mean_scale(averaging, tokens_N, group_N, episode_N) / _checked(length)
        return np.full(len(tokens_N), share, np.float32)
    unit_N = np.unique(episode_N if averaging == "sequence" else group_N, return_inverse=True)[1]
    tokens_U = np.bincount(unit_N, weights=tokens_N)
    units = max(np.count_nonzero(tokens_U), 1)
    return (tokens_N.sum() / (units * np.maximum(tokens_U[unit_N], 1))).astype(np.float32)


def mean_scale(
    averaging: Averaging, tokens_N: np.ndarray, group_N: np.ndarray, episode_N: np.ndarray
) -> float:
    """Return the factor from a sum of means of units to the sum of token losses of a mini-batch.

    It is the number of tokens / the number of units for means of episodes and of prompts, so that Megatron's
    division by the number of tokens leaves the mean over units; 1 for the sum over tokens. The arguments are
    those of ``token_shares``.
    """
    if averaging == "token":
        return 1.0
    units_N = group_N if averaging == "prompt" else episode_N
    units = np.unique(units_N if averaging == "constant" else units_N[tokens_N > 0])
    return float(tokens_N.sum() / max(len(units), 1))


def _checked(length: int | None) -> int:
    if length is None or length < 1:
        raise ValueError(f"averaging: constant divides by a length of at least 1, and the length is {length}")
    return length
