"""PPO's clipped surrogate (arXiv:1707.06347, eq. 7), as an objective of your own."""

import torch
from torch import Tensor

from slipstream import PolicyLoss, Tokens


class Clipped:
    corrects_staleness = False  # the importance weight of the decoupled loss stays

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.28) -> None:
        self.low, self.high = 1 - clip_low, 1 + clip_high

    def loss(self, tokens: Tokens, old_logp_M: Tensor) -> PolicyLoss:
        ratio_M = (tokens.logp_M - old_logp_M).clamp(-20, 20).exp()
        plain_M = ratio_M * tokens.advantage_M
        clipped_M = ratio_M.clamp(self.low, self.high) * tokens.advantage_M
        is_clipped_M = (clipped_M < plain_M).detach()
        return PolicyLoss(-torch.minimum(plain_M, clipped_M), ratio_M.detach(), is_clipped_M)
