"""What has equal weight in the loss of a mini-batch: tokens, sequences or prompts."""

from typing import Literal

import numpy as np


def token_shares(
    averaging: Literal["token", "sequence", "prompt"], tokens_N: np.ndarray, group_N: np.ndarray
) -> np.ndarray:
    """How often each token of trajectory n counts in a mean over all tokens of a mini-batch, float32 [N].

    The trainer sums token losses and Megatron divides the gradient by all T tokens of the mini-batch, on all
    ranks. With these factors that is, for ``tokens_N`` tokens that carry loss,

        token:     mean over tokens                                            1
        sequence:  mean over sequences of the mean over their tokens           T / (sequences * own tokens)
        prompt:    mean over prompts of the mean over their answers' tokens    T / (prompts * their tokens)

    All trajectories of the mini-batch are needed, those of other micro-batches and ranks included. Those
    without tokens count for nothing. Tokens that a correction drops still count in the means.
    """
    if averaging == "token":
        return np.ones(len(tokens_N), np.float32)
    unit_N = (
        np.arange(len(tokens_N)) if averaging == "sequence" else np.unique(group_N, return_inverse=True)[1]
    )
    tokens_U = np.bincount(unit_N, weights=tokens_N)
    units = max(np.count_nonzero(tokens_U), 1)
    return (tokens_N.sum() / (units * np.maximum(tokens_U[unit_N], 1))).astype(np.float32)
