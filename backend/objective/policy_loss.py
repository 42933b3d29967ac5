"""The result of every policy loss, the ratio that all of them take, and sums over trajectories.

Losses are pure functions on tensors of any float type. They are minimised and give one value per token.
``old_logp_T`` is the log-prob under pi_old or under mu, as the caller decides.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Ratios are held within exp(+-20): exp would overflow, and 0 * inf make NaN of the gradient. Clip ranges end
long before, so the bound only affects tokens whose ratio has left the range on the side without a clip."""


@dataclass(frozen=True)
class PolicyLoss:
    """Results per token, [T]."""

    loss_T: Tensor
    ratio_T: Tensor
    """Ratio that the loss takes, without gradient."""
    clipped_T: Tensor
    """True where the bound of the loss acts: no gradient, or (CISPO, AIPO) a capped weight."""
    masked: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Correction -> bool [T]: True where it drops the token."""


def ratio_of(logp_T: Tensor, old_logp_T: Tensor) -> Tensor:
    """Return pi / pi_old, without gradient beyond LOG_RATIO_BOUND."""
    return (logp_T - old_logp_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def trajectory_mean(value_T: Tensor, owner_T: Tensor, owners: int) -> Tensor:
    """Return the mean over each token's trajectory, [T]."""
    ones_T = torch.ones_like(value_T)
    return trajectory_sum(value_T, owner_T, owners) / trajectory_sum(ones_T, owner_T, owners)


def trajectory_sum(value_T: Tensor, owner_T: Tensor, owners: int) -> Tensor:
    """Return the sum over each token's trajectory, [T]."""
    sum_N = torch.zeros(owners, dtype=torch.float64, device=value_T.device)
    return sum_N.index_add_(0, owner_T, value_T.double())[owner_T].to(value_T.dtype)
