"""Advantages: of trajectories from their rewards, of tokens from values, turns or a teacher.

Legend: N trajectories of a batch, G groups, T tokens of one trajectory, K its turns, M tokens of several
trajectories. ``group_N`` (int): equal for trajectories of one prompt.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.backend.objective.typed_torch import typed_torch

# ---- from rewards


def group_normalized(reward_N: Tensor, group_N: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO: (reward - group mean) / (group standard deviation + eps), float32 [N].

    The standard deviation is the unbiased one, as in the paper's reference code (DeepSeekMath, eq. 3 ff.). A
    group of equal rewards has advantage 0.
    """
    centred_N, index_N, count_G = _centred(reward_N, group_N)
    square_G = _summed(centred_N**2, index_N, len(count_G))
    deviation_G = (square_G / (count_G - 1).clamp(min=1)).sqrt()
    return (centred_N / (deviation_G[index_N] + eps)).float()


def group_centred(reward_N: Tensor, group_N: Tensor) -> Tensor:
    """Dr.GRPO: reward - group mean, float32 [N] (arXiv:2503.20783). Hard and easy prompts weigh alike."""
    return _centred(reward_N, group_N)[0].float()


def leave_one_out(reward_N: Tensor, group_N: Tensor) -> Tensor:
    """RLOO: reward - mean of the other rewards of the group, float32 [N] (arXiv:2402.14740).

    A group of one trajectory has advantage 0.
    """
    centred_N, index_N, count_G = _centred(reward_N, group_N)
    return (centred_N * (count_G / (count_G - 1).clamp(min=1))[index_N]).float()


def whitened(value_N: Tensor, tokens_N: Tensor, eps: float = 1e-8) -> Tensor:
    """REINFORCE++: (value - mean) / (standard deviation + eps) over the tokens of the batch, float32 [N].

    Each of the ``tokens_N`` tokens of a trajectory has the trajectory's value (arXiv:2501.03262, without its
    KL penalty, which needs a reference model).
    """
    value_N, share_N = value_N.double(), tokens_N.double() / tokens_N.sum().clamp(min=1)
    centred_N = value_N - value_N[:1]  # exact for equal values
    centred_N = centred_N - (share_N * centred_N).sum()
    return (centred_N / ((share_N * centred_N**2).sum().sqrt() + eps)).float()


ADVANTAGES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "reward": lambda reward_N, group_N, tokens_N: reward_N.float(),
    "grpo": lambda reward_N, group_N, tokens_N: group_normalized(reward_N, group_N),
    "dr_grpo": lambda reward_N, group_N, tokens_N: group_centred(reward_N, group_N),
    "rloo": lambda reward_N, group_N, tokens_N: leave_one_out(reward_N, group_N),
    "reinforce_pp": lambda reward_N, group_N, tokens_N: whitened(reward_N, tokens_N),
    "reinforce_pp_baseline": lambda reward_N, group_N, tokens_N: whitened(
        group_centred(reward_N, group_N), tokens_N
    ),
}
"""Estimator of the rewards -> advantages [N] of (rewards, groups, numbers of tokens that carry loss)."""


def overlong_penalty(length_N: Tensor, *, start: int, end: int, penalty: float) -> Tensor:
    """Return the amount to subtract from each reward, [N].

    It is 0 up to ``start`` tokens, ``penalty`` from ``end`` tokens on, and linear between: DAPO's soft
    overlong punishment (arXiv:2503.14476, eq. 13) with L_max = end and L_cache = end - start.
    """
    return penalty * ((length_N - start) / (end - start)).clamp(0, 1)


# ---- from values, turns, a teacher


def generalized_advantage(
    reward_M: Tensor, value_M: Tensor, owner_M: Tensor, *, discount: float, decay: float
) -> Tensor:
    """GAE (arXiv:1506.02438, eq. 16): A_t = sum over l of (discount decay)^l delta_{t+l}, [M], with
    delta_t = r_t + discount V_{t+1} - V_t and V = 0 after the last token of a trajectory.

    The trajectories lie one after the other; ``owner_M`` (int, ascending) is the trajectory of each token.
    The return that a critic learns is A + V.
    """
    delta_M = reward_M + discount * _ahead(value_M, owner_M, 1) - value_M
    # Each iteration doubles the number of terms in the sums of all tokens.
    sum_M, terms = delta_M, 1
    longest = int(owner_M.bincount().max()) if len(owner_M) else 0
    while terms < longest:
        sum_M = sum_M + (discount * decay) ** terms * _ahead(sum_M, owner_M, terms)
        terms *= 2
    return sum_M


def _ahead(value_M: Tensor, owner_M: Tensor, distance: int) -> Tensor:
    """Return the value ``distance`` tokens later in the same trajectory, 0 past its end."""
    ahead_M = torch.zeros_like(value_M)
    same_M = owner_M[distance:] == owner_M[:-distance]
    ahead_M[:-distance] = torch.where(same_M, value_M[distance:], 0)
    return ahead_M


def rewards_to_go(reward_K: Tensor, turn_T: Tensor, *, discount: float = 1.0) -> Tensor:
    """Return for each token the discounted sum of the rewards from its turn on, [T].

    turn_T (int): turn of each token; a token of turn -1 belongs to none and gets 0.
    """
    to_go, ahead = torch.zeros(len(reward_K) + 1, dtype=reward_K.dtype), reward_K.new_zeros(())
    for k in reversed(range(len(reward_K))):
        ahead = reward_K[k] + discount * ahead
        to_go[k] = ahead
    return to_go[turn_T]  # index -1 is the additional last entry, which stays 0


def teacher_gap(teacher_logp_T: Tensor, old_logp_T: Tensor) -> Tensor:
    """On-policy distillation: log pi_teacher - log pi_old of the sampled tokens, [T].

    The expectation of its sum over the policy is -KL(pi_old || teacher). The teacher may see a hint that the
    policy does not.
    """
    return (teacher_logp_T - old_logp_T).detach()


def weighted_sum(parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Return the sum of several (weight, advantage) of the same tokens, [T]; advantages broadcast."""
    weighted = typed_torch.broadcast_tensors(*(weight * part for weight, part in parts))
    return torch.stack(weighted).sum(dim=0)


def _centred(reward_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return reward - group mean (float64 [N]), the index of each trajectory's group [N], group sizes [G]."""
    reward_N = reward_N.double()
    _, index_N, count_G = typed_torch.unique(group_N, return_inverse=True, return_counts=True)
    mean_G = _summed(reward_N, index_N, len(count_G)) / count_G
    return reward_N - mean_G[index_N], index_N, count_G


def _summed(value_N: Tensor, index_N: Tensor, groups: int) -> Tensor:
    return torch.zeros(groups, dtype=torch.double).index_add_(0, index_N, value_N)
