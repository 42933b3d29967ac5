"""Estimates of KL(pi || ref) from sampled tokens, in the loss or in the reward. ref is a fixed policy.

With x = log pi - log ref of a token: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x
(http://joschu.net/blog/kl-approx.html).
"""

from typing import Literal

import torch
from torch import Tensor

from slipstream.backend.objective.policy_loss import LOG_RATIO_BOUND, ratio_of

Estimator = Literal["k1", "k2", "k3"]


def estimate(logp_T: Tensor, reference_logp_T: Tensor, estimator: Estimator) -> Tensor:
    """Return one estimate per token, [T].

    Over tokens that pi sampled, the means of k1 and k3 are the divergence; the mean of k2 is not.
    """
    x_T = logp_T - reference_logp_T
    if estimator == "k1":
        return x_T
    if estimator == "k2":
        return x_T**2 / 2
    return torch.expm1((-x_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)) + x_T


def in_loss(
    logp_T: Tensor, reference_logp_T: Tensor, behaviour_logp_T: Tensor, estimator: Estimator
) -> Tensor:
    """Return pi / mu times the estimate, [T] (DeepSeek-V3.2; slime's importance ratio).

    Over tokens that mu sampled, the mean of its gradient is the gradient of KL(pi || ref). The mean of its
    value is KL(pi || ref) for k1 and k3, not for k2. k1 and k3 need the gradient of the ratio: without it the
    mean gradient is 0 for k1, and that of a different divergence for k3 (arXiv:2506.09477). For k2 the ratio
    is only a weight.
    """
    ratio_T = ratio_of(logp_T, behaviour_logp_T)
    if estimator == "k2":
        ratio_T = ratio_T.detach()
    return ratio_T * estimate(logp_T, reference_logp_T, estimator)
