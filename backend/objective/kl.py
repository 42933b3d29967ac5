"""Estimates of KL(pi || ref) from sampled tokens, in the loss or in the reward. ref is a fixed policy.

With x = log pi - log ref of a token: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x
(http://joschu.net/blog/kl-approx.html).
"""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from slipstream.backend.objective.policy_loss import LOG_RATIO_BOUND, ratio_of


class ReferencePenalty(Protocol):
    """A measure of how far the policy is from the reference: any class with this method.
    ``actor.kl.penalty`` names it, in place of ``actor.kl.estimator``.

    It runs on trainer ranks of the last pipeline stage, once for each micro-batch: in each optimizer update
    (``actor.kl.where: loss``), or before the first one (``reward``). Ranks of a tensor- or context-parallel
    group call it with the same tokens. What it raises ends the run.
    """

    def estimate(self, logp_M: Tensor, reference_logp_M: Tensor) -> Tensor:
        """Return one number for each of the M tokens with loss, in nats: float32 [M].

        Both arguments are float32 [M], natural logarithms at the sampling temperature, and M may be 0. With
        ``where: loss``, ``logp_M`` has a gradient; the result is multiplied by pi / mu and by
        ``actor.kl.coefficient``, and added to the loss. With ``where: reward``, ``logp_M`` is of the policy
        that the step starts from, and the result is subtracted from the reward.
        """
        ...


Estimator = Literal["k1", "k2", "k3"]

Estimate = Callable[[Tensor, Tensor], Tensor]
"""From log-probs of the policy and of the reference to an estimate per token, [T] each."""


def estimate(logp_T: Tensor, reference_logp_T: Tensor, estimator: Estimator | Estimate) -> Tensor:
    """Return one estimate per token, [T].

    Over tokens that pi sampled, the means of k1 and k3 are the divergence; the mean of k2 is not.
    """
    if callable(estimator):
        return estimator(logp_T, reference_logp_T)
    x_T = logp_T - reference_logp_T
    if estimator == "k1":
        return x_T
    if estimator == "k2":
        return x_T**2 / 2
    return torch.expm1((-x_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)) + x_T


def in_loss(
    logp_T: Tensor, reference_logp_T: Tensor, behaviour_logp_T: Tensor, estimator: Estimator | Estimate
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
