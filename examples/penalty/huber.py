"""The square of log pi - log ref, which grows linearly from `knee` on: outliers pull less."""

import torch
from torch import Tensor


class Huber:
    def __init__(self, knee: float = 1.0) -> None:
        self.knee = knee

    def estimate(self, logp_M: Tensor, reference_logp_M: Tensor) -> Tensor:
        return torch.nn.functional.huber_loss(logp_M, reference_logp_M, reduction="none", delta=self.knee)
