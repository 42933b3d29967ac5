"""Corrections for tokens that another policy sampled: importance weights and masks, all without gradient.

``log_weight_T`` is log(pi_old / mu). Since pi_old is computed now, it contains both the mismatch between
trainer and engine and the staleness of the token. A mask is True where a token is dropped.
"""

import math

import torch
from torch import Tensor

from slipstream.backend.objective.policy_loss import LOG_RATIO_BOUND, trajectory_mean, trajectory_sum


def importance_weight(log_weight_T: Tensor, cap: float | None) -> Tensor:
    """min(pi_old / mu, cap) (AReaL, arXiv:2505.24298, eq. 5; capped: truncated importance sampling).

    cap: None caps the weight only at exp(LOG_RATIO_BOUND), so that it stays finite.
    """
    highest = math.exp(LOG_RATIO_BOUND) if cap is None else cap
    return log_weight_T.exp().clamp(max=highest).detach()


def outside_band(log_weight_T: Tensor, *, low: float | None, high: float) -> Tensor:
    """True where pi_old / mu is outside [low, high] (IcePop's token mask). low: None is no lower limit."""
    weight_T = log_weight_T.detach().exp()
    above_T = weight_T > high
    return above_T if low is None else above_T | (weight_T < low)


def geometric_outside_band(
    log_weight_T: Tensor, owner_T: Tensor, owners: int, *, low: float, high: float
) -> Tensor:
    """True where the trajectory's geometric mean of pi_old / mu is outside [low, high]."""
    return outside_band(trajectory_mean(log_weight_T.detach(), owner_T, owners), low=low, high=high)


def product_outside_band(
    log_weight_T: Tensor, owner_T: Tensor, owners: int, *, low: float, high: float
) -> Tensor:
    """True where the trajectory's product of pi_old / mu is outside [low, high]."""
    return outside_band(trajectory_sum(log_weight_T.detach(), owner_T, owners), low=low, high=high)


def divergence_above(log_weight_T: Tensor, owner_T: Tensor, owners: int, *, maximum: float) -> Tensor:
    """True where the trajectory's mean of exp(x) - 1 - x, x = log(pi_old / mu), is above ``maximum``.

    The mean is an estimate of KL(mu || pi_old) from tokens that mu sampled, and is never negative.
    """
    x_T = log_weight_T.detach().double()
    return trajectory_mean(torch.expm1(x_T.clamp(max=LOG_RATIO_BOUND)) - x_T, owner_T, owners) > maximum


def left_negative(
    logp_T: Tensor,
    behaviour_logp_T: Tensor,
    advantage_T: Tensor,
    owner_T: Tensor,
    owners: int,
    *,
    delta: float,
    errors: float | None,
    mismatch: float | None,
) -> Tensor:
    """True where A < 0 and the trajectory's mean of log(mu / pi) is too large (DeepSeek-V3.2, eq. 9).

    The paper's pi_old is the inference engine's policy, mu here, and it is compared with the policy being
    updated: the mask responds to mismatch, staleness and the updates of this step together. The paper's
    threshold is ``delta``, which mismatch alone exceeds: by it, log(mu / pi) has the mean v / 2 and the
    variance v under mu, v = ``mismatch``, to second order, so that its mean over T tokens exceeds
    delta + v / 2 + errors * sqrt(v / T) by chance only. Without ``errors``, the threshold is ``delta``.
    Nothing is dropped as long as ``mismatch`` is not known.
    """
    gap_T = trajectory_mean((behaviour_logp_T - logp_T).detach(), owner_T, owners)
    is_failure_T = advantage_T < 0
    if errors is None:
        return is_failure_T & (gap_T > delta)
    if mismatch is None:
        return torch.zeros_like(is_failure_T)
    tokens_T = trajectory_sum(torch.ones_like(gap_T), owner_T, owners)
    return is_failure_T & (gap_T > delta + mismatch / 2 + errors * (mismatch / tokens_T).sqrt())


def interpolated_logp(logp_T: Tensor, behaviour_logp_T: Tensor, lag_T: Tensor) -> Tensor:
    """log mu + a (log pi - log mu), detached: proximal log-probs without a forward pass.

    A-3PO, arXiv:2512.06547: a = (v_old - v_mu) / (v_pi - v_mu), within [0, 1]. The step starts from v_old and
    makes v_pi = v_old + 1, so that a = lag / (lag + 1).
    """
    lag_T = lag_T.to(logp_T.dtype).clamp(min=0)
    return (behaviour_logp_T + lag_T / (lag_T + 1) * (logp_T - behaviour_logp_T)).detach()
