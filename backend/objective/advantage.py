"""Advantages of trajectories from their rewards."""

import torch
from torch import Tensor


def group_normalized(reward_N: Tensor, group_N: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO: (reward - group mean) / (group standard deviation + eps), float32 [N].

    ``group_N`` (int) tells which rewards belong together. The deviation is the unbiased one, as in the GRPO
    paper's reference code (DeepSeekMath, eq. 3 ff.); a group of equal rewards has advantage 0.
    """
    reward_N = reward_N.double()
    _, index_N, count_G = group_N.unique(return_inverse=True, return_counts=True)
    mean_G = torch.zeros(len(count_G), dtype=torch.double).index_add_(0, index_N, reward_N) / count_G
    centred_N = reward_N - mean_G[index_N]
    square_G = torch.zeros_like(mean_G).index_add_(0, index_N, centred_N**2)
    deviation_G = (square_G / (count_G - 1).clamp(min=1)).sqrt()
    return (centred_N / (deviation_G[index_N] + eps)).float()
