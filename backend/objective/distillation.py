"""Divergence from a teacher of which only the likeliest tokens are known at each place.

The teacher gives log-probs t of K tokens, the policy has log-probs s of the same tokens. All other tokens are
one further outcome, the tail, with the probability that is left. Over these K + 1 outcomes

    KL(policy || teacher) = sum over k of exp(s_k) (s_k - t_k) + P (log P - log Q)

where P = 1 - sum exp(s_k) and Q = 1 - sum exp(t_k). It is at most the divergence over the whole vocabulary
(data-processing inequality), and 0 if the two agree. Its gradient goes through s alone.

Shapes: T tokens, K choices at each.
"""

import math

import torch
from torch import Tensor

SMALLEST_TAIL = 2.0**-23
"""Smallest probability of a tail: what rounding makes of the sum of K float32 probabilities."""

ABSENT = -1e3
"""Log-prob of a choice that there is not: exp of it is 0, and 0 times it is 0."""


def log_rest(log_sum_T: Tensor) -> Tensor:
    """Return log(1 - exp(x)) of each x <= 0 without cancellation, at least log ``SMALLEST_TAIL``.

    Above -log 2 the difference 1 - exp(x) is -expm1(x), which is exact where exp(x) is close to 1; below it
    log1p(-exp(x)) is exact where exp(x) is small.
    """
    x_T = log_sum_T.clamp(max=math.log1p(-SMALLEST_TAIL))
    return torch.where(x_T > -math.log(2), torch.log(-torch.expm1(x_T)), torch.log1p(-torch.exp(x_T)))


def divergence_from_top_tokens(student_TK: Tensor, teacher_TK: Tensor) -> Tensor:
    """Return KL(policy || teacher) over the teacher's choices and the tail, [T], in nats.

    student_TK: log-probs of the policy (differentiable). teacher_TK: those of the teacher; NaN for a choice
    that there is not. A place without a choice has the divergence 0, and no gradient.
    """
    has_TK = ~teacher_TK.isnan()
    s_TK = torch.where(has_TK, student_TK.double(), ABSENT)
    t_TK = torch.where(has_TK, teacher_TK.double(), ABSENT)
    policy_rest_T, teacher_rest_T = log_rest(s_TK.logsumexp(-1)), log_rest(t_TK.logsumexp(-1))
    of_choices_T = (s_TK.exp() * (s_TK - t_TK)).sum(-1)
    divergence_T = of_choices_T + policy_rest_T.exp() * (policy_rest_T - teacher_rest_T)
    return divergence_T.to(student_TK.dtype)
