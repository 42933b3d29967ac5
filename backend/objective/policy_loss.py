"""Every policy loss that ships, and the ratio and the sums over trajectories that losses take.

clipped     ``ppo``, ``dual_clip``, ``decayed_clip``, ``gspo``: the ratio is held within a range
masked      ``m2po``, ``dppo``: tokens outside a trust region are dropped; the ratio is taken to mu
weighted    ``reinforce``, ``truncated`` (CISPO, AIPO), ``tapered`` (TOPR), ``sapo``: log-probs with a weight

``losses.token_losses`` chooses one by ``actor.objective``, and applies what surrounds it. Losses are pure
functions on tensors of any float type. They are minimised and give one value per token. ``old_logp_T`` is the
log-prob under pi_old or under mu, as the caller decides.
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


def m2po(logp_T: Tensor, behaviour_logp_T: Tensor, advantage_T: Tensor, *, threshold: float) -> PolicyLoss:
    """-M r A with r = pi / mu, no clip (M2PO, arXiv:2510.01161).

    The mask M drops the tokens of largest (log r)^2 until the mean over the remaining ones is at most
    ``threshold``. The mean is over the tokens given, those of a micro-batch; the bound then holds over any
    union of micro-batches. If no token satisfies it, all are dropped.
    """
    moment_T = (logp_T - behaviour_logp_T).detach().double() ** 2
    ordered_T, order_T = moment_T.sort(descending=True)
    rest_T = torch.arange(len(moment_T), 0, -1, device=moment_T.device)
    mean_of_rest_T = ordered_T.flip(0).cumsum(0).flip(0) / rest_T
    # Means fall along the order, so the tokens to drop come first.
    dropped_T = torch.zeros_like(moment_T, dtype=torch.bool)
    dropped_T[order_T] = mean_of_rest_T > threshold
    ratio_T = ratio_of(logp_T, behaviour_logp_T)
    return PolicyLoss(torch.where(dropped_T, 0.0, -ratio_T * advantage_T), ratio_T.detach(), dropped_T)


def dppo(
    logp_T: Tensor,
    behaviour_logp_T: Tensor,
    advantage_T: Tensor,
    *,
    mask_low: float,
    mask_high: float,
    kl: float,
) -> PolicyLoss:
    """-M A pi / mu + kl log(pi / mu)^2 (DPPO, binary total variation, arXiv:2602.04879; prime-rl's loss).

    With d = pi - mu (probabilities) the mask M drops a token if A > 0 and d > mask_high, or A <= 0 and
    d < -mask_low. The last term holds for dropped tokens too and brings them back.
    """
    moved_T = (logp_T.exp() - behaviour_logp_T.exp()).detach()
    dropped_T = torch.where(advantage_T > 0, moved_T > mask_high, moved_T < -mask_low)
    ratio_T = ratio_of(logp_T, behaviour_logp_T)
    loss_T = torch.where(dropped_T, 0.0, -ratio_T * advantage_T) + kl * (logp_T - behaviour_logp_T) ** 2
    return PolicyLoss(loss_T, ratio_T.detach(), dropped_T)


def reinforce(logp_T: Tensor, old_logp_T: Tensor, advantage_T: Tensor) -> PolicyLoss:
    """-A log pi (Williams, 1992). The baseline is in A; the old log-probs only give the reported ratio."""
    ratio_T = ratio_of(logp_T, old_logp_T).detach()
    return PolicyLoss(-advantage_T * logp_T, ratio_T, torch.zeros_like(ratio_T, dtype=torch.bool))


def truncated(logp_T: Tensor, old_logp_T: Tensor, advantage_T: Tensor, *, cap: float) -> PolicyLoss:
    """-sg(min(r, cap)) A log pi: every token has the gradient min(r, cap) A grad log pi.

    AIPO (LlamaRL, arXiv:2505.24034) takes r = pi / mu. CISPO (MiniMax-M1, arXiv:2506.13585) takes
    r = pi / pi_old and cap = 1 + clip_high, without its lower bound, which its authors do not use either.
    """
    ratio_T = ratio_of(logp_T, old_logp_T).detach()
    return PolicyLoss(-ratio_T.clamp(max=cap) * advantage_T * logp_T, ratio_T, ratio_T > cap)


def tapered(
    logp_T: Tensor, old_logp_T: Tensor, advantage_T: Tensor, owner_T: Tensor, owners: int
) -> PolicyLoss:
    """-sg(w) A log pi with w = 1 where A >= 0, else min(1, product of pi / mu over the trajectory).

    Tapered off-policy REINFORCE (TOPR, arXiv:2503.14286, eq. 8): a success is imitated however old it is, a
    failure is pushed down as long as the policy would still sample it. ``old_logp_T`` is log mu.
    """
    ratio_T = ratio_of(logp_T, old_logp_T).detach()
    gap_T = trajectory_sum((logp_T - old_logp_T).detach(), owner_T, owners)
    taper_T = gap_T.clamp(-LOG_RATIO_BOUND, 0).exp()
    is_failure_T = advantage_T < 0
    weight_T = torch.where(is_failure_T, taper_T, torch.ones_like(taper_T))
    return PolicyLoss(-weight_T * advantage_T * logp_T, ratio_T, is_failure_T & (gap_T > 0))


def sapo(
    logp_T: Tensor, old_logp_T: Tensor, advantage_T: Tensor, *, tau_positive: float, tau_negative: float
) -> PolicyLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A with r = pi / pi_old (SAPO, arXiv:2511.20347).

    tau is ``tau_positive`` where A > 0, else ``tau_negative``. At r = 1 the gradient is that of r A; it fades
    on both sides.
    """
    ratio_T = ratio_of(logp_T, old_logp_T)
    tau_T = torch.full_like(ratio_T, tau_negative).masked_fill(advantage_T > 0, tau_positive)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T
    return PolicyLoss(-gate_T * advantage_T, ratio_T.detach(), torch.zeros_like(ratio_T, dtype=torch.bool))
