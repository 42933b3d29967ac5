"""Policy gradients that are weighted by a ratio instead of clipped: CISPO, AIPO, SAPO, REINFORCE."""

import torch
from torch import Tensor

from slipstream.backend.objective.policy_loss import PolicyLoss, ratio_of


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
