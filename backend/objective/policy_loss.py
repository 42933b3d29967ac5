"""What every policy loss gives, and the ratio that all of them take.

mu: behaviour policy that sampled a token (the engine's log-prob). pi_old: proximal policy, that of the
weights which the step starts from. pi: the policy being updated. ``old_logp_T`` is of pi_old or mu, as the
caller decides.

Losses are pure functions on tensors of any float type, minimised, one value per token. Legend: T tokens;
``owner_T`` (int64) the sequence of each token, one of ``owners``.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Ratios are held within exp(+-20): exp would overflow, and 0 * inf make NaN of the gradient. Clip ranges
end long before, so only tokens are touched whose ratio has left the range on the side that is not clipped."""


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token results [T]."""

    loss_T: Tensor
    ratio_T: Tensor
    """The ratio that the loss has taken, without gradient."""
    clipped_T: Tensor
    """True where the bound of the loss acts: no gradient, or (CISPO, AIPO) a weight that is capped."""
    masked: dict[str, Tensor] = field(default_factory=dict)
    """By correction: True [T] where it has removed the token."""


def ratio_of(logp_T: Tensor, old_logp_T: Tensor) -> Tensor:
    """pi / pi_old; no gradient beyond LOG_RATIO_BOUND."""
    return (logp_T - old_logp_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def sequence_mean(value_T: Tensor, owner_T: Tensor, owners: int) -> Tensor:
    """The mean of each sequence, at each of its tokens [T]."""
    return sequence_sum(value_T, owner_T, owners) / sequence_sum(torch.ones_like(value_T), owner_T, owners)


def sequence_sum(value_T: Tensor, owner_T: Tensor, owners: int) -> Tensor:
    """The sum of each sequence, at each of its tokens [T]."""
    sum_N = torch.zeros(owners, dtype=torch.float64, device=value_T.device)
    return sum_N.index_add_(0, owner_T, value_T.double())[owner_T].to(value_T.dtype)
