"""Trust regions that mask tokens instead of clipping: M2PO, DPPO. Both take the ratio to mu."""

import torch
from torch import Tensor

from slipstream.backend.objective.policy_loss import PolicyLoss, ratio_of


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
