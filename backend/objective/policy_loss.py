"""Clipped policy losses, summed over tokens.

mu: behaviour policy that sampled a token (the engine's log-prob). pi_old: proximal policy, recomputed by the
trainer with the weights that the step starts from. pi: the policy being updated.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Ratios are held within exp(+-20): exp would overflow, and 0 * inf make NaN of the gradient. Clip ranges
end long before, so only tokens are touched whose ratio has left the range on the side that is not clipped."""


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token results, float32 [T]; values outside the caller's mask are meaningless."""

    loss_T: Tensor
    ratio_T: Tensor
    clipped_T: Tensor
    """True where the clipped term is the one that counts: the token has no gradient."""
    weight_T: Tensor
    """The behaviour weight that was applied, without gradient."""


def ppo(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi / pi_old (PPO, arXiv:1707.06347, eq. 7).

    Separate clip ranges: DAPO, arXiv:2503.14476, eq. 10. No gradient beyond LOG_RATIO_BOUND.
    """
    ratio_T = (logp_T - old_logp_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    plain_T = ratio_T * advantage_T
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantage_T
    return PolicyLoss(
        -torch.minimum(plain_T, clipped_T),
        ratio_T.detach(),
        (clipped_T < plain_T).detach(),
        torch.ones_like(ratio_T).detach(),
    )


def decoupled_ppo(
    logp_T: Tensor,
    proximal_logp_T: Tensor,
    behaviour_logp_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weight_cap: float,
) -> PolicyLoss:
    """w * PPO around the proximal policy, w = min(pi_old / mu, weight_cap) (AReaL, arXiv:2505.24298, eq. 5).

    The weight corrects for who sampled the token, the clip bounds how far this step moves; each is applied
    once. The weight carries no gradient.
    """
    inner = ppo(logp_T, proximal_logp_T, advantage_T, clip_low=clip_low, clip_high=clip_high)
    weight_T = (proximal_logp_T - behaviour_logp_T).exp().clamp(max=weight_cap).detach()
    return PolicyLoss(weight_T * inner.loss_T, inner.ratio_T, inner.clipped_T, weight_T)
