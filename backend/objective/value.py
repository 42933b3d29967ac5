"""Losses of models with values: a critic's distance to the return, a reward model's to a preference."""

import torch
from torch import Tensor


def value_loss(
    value_M: Tensor, old_value_M: Tensor, return_M: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the loss of each value, [M], and where its clipped term decides, bool [M].

    The loss is max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2, as in PPO's reference code
    (openai/baselines, ppo2). With ``clip`` None it is (V - R)^2 / 2.
    """
    plain_M = (value_M - return_M) ** 2 / 2
    if clip is None:
        return plain_M, torch.zeros_like(plain_M, dtype=torch.bool)
    held_M = (torch.clamp(value_M, old_value_M - clip, old_value_M + clip) - return_M) ** 2 / 2
    return torch.maximum(plain_M, held_M), held_M > plain_M


def preference_loss(chosen_K: Tensor, rejected_K: Tensor) -> Tensor:
    """Return -log sigmoid(chosen - rejected) of K pairs of values, [K] (Bradley-Terry; arXiv:2203.02155)."""
    return torch.nn.functional.softplus(rejected_K - chosen_K)
