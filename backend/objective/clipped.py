"""Clipped surrogates: PPO, dual clip, the clip that decays with lag, GSPO."""

import torch
from torch import Tensor

from slipstream.backend.objective.policy_loss import LOG_RATIO_BOUND, PolicyLoss, ratio_of, trajectory_mean


def ppo(
    logp_T: Tensor, old_logp_T: Tensor, advantage_T: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi / pi_old (PPO, arXiv:1707.06347, eq. 7).

    Separate clip ranges: DAPO, arXiv:2503.14476, eq. 10. No gradient beyond LOG_RATIO_BOUND.
    """
    ratio_T = ratio_of(logp_T, old_logp_T)
    return _surrogate(ratio_T, ratio_T.clamp(1 - clip_low, 1 + clip_high), advantage_T)


def dual_clip(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    bound: float,
) -> PolicyLoss:
    """PPO, bounded for A < 0: at most -bound * A (arXiv:1912.09729, eq. 5)."""
    inner = ppo(logp_T, old_logp_T, advantage_T, clip_low=clip_low, clip_high=clip_high)
    ceiling_T = -bound * advantage_T
    bounded_T = (advantage_T < 0) & (inner.loss_T > ceiling_T)
    return PolicyLoss(
        torch.where(bounded_T, ceiling_T, inner.loss_T), inner.ratio_T, inner.clipped_T | bounded_T
    )


def decayed_clip(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantage_T: Tensor,
    lag_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    decay: float,
    floor: float,
) -> PolicyLoss:
    """PPO with clip ranges scaled by max(floor, decay^lag): the older a token, the less it may move."""
    scale_T = (decay ** lag_T.to(logp_T.dtype)).clamp(min=floor)
    ratio_T = ratio_of(logp_T, old_logp_T)
    return _surrogate(ratio_T, ratio_T.clamp(1 - clip_low * scale_T, 1 + clip_high * scale_T), advantage_T)


def gspo(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantage_T: Tensor,
    owner_T: Tensor,
    owners: int,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO on s = exp(mean of log(pi / pi_old) over the trajectory) (GSPO, arXiv:2507.18071).

    The ratio of a token is sg(s) pi / sg(pi), the paper's GSPO-token. It equals s in value and, if all tokens
    of a trajectory have one advantage, in gradient. Averaged by token, then by trajectory, it gives the
    paper's loss.
    """
    gap_T = trajectory_mean((logp_T - old_logp_T).detach(), owner_T, owners)
    straight_T = logp_T - logp_T.detach()  # 0, with the gradient of logp_T
    ratio_T = (gap_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND) + straight_T).exp()
    return _surrogate(ratio_T, ratio_T.clamp(1 - clip_low, 1 + clip_high), advantage_T)


def _surrogate(ratio_T: Tensor, clipped_ratio_T: Tensor, advantage_T: Tensor) -> PolicyLoss:
    plain_T = ratio_T * advantage_T
    clipped_T = clipped_ratio_T * advantage_T
    return PolicyLoss(-torch.minimum(plain_T, clipped_T), ratio_T.detach(), (clipped_T < plain_T).detach())
