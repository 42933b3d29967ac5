"""Policy gradients that are weighted by a ratio instead of clipped: CISPO, AIPO, TOPR, SAPO,
REINFORCE.
"""

import torch
from torch import Tensor

from slipstream.backend.objective.policy_loss import LOG_RATIO_BOUND, PolicyLoss, ratio_of, trajectory_sum


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
