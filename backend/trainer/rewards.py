"""Rewards before they become advantages: of trajectories, of turns, and penalties for leaving the reference.

Legend: N trajectories of the batch, K turns of one trajectory, M tokens with loss of one micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.objective import kl
from slipstream.backend.objective.advantage import ADVANTAGES, overlong_penalty, rewards_to_go
from slipstream.backend.trainer.prepared import Scores
from slipstream.configs.schema import ActorConfig, KLConfig, TurnsConfig


def trajectory_rewards(actor: ActorConfig, batch: TrainBatch) -> Tensor:
    """Return the reward of each trajectory less the penalty for its length, float64 [N].

    Live trajectories without a reward have 0: their turns have advantages of their own.
    """
    rewards = [trajectory.reward for trajectory in batch.trajectories]
    for number in batch.turn_advantages:
        rewards[number] = rewards[number] or 0.0
    reward_N = torch.tensor(rewards, dtype=torch.float64)
    overlong = actor.overlong
    if overlong is not None:
        length_N = torch.tensor([trajectory.sampled_length for trajectory in batch.trajectories])
        reward_N = reward_N - overlong_penalty(
            length_N, start=overlong.start, end=overlong.end, penalty=overlong.penalty
        )
    return reward_N


# ---- turns


@dataclass(frozen=True)
class TurnRewards:
    """Rewards of the turns of each trajectory, times their coefficient; float64 [K] each."""

    settings: TurnsConfig
    by_trajectory: Sequence[Tensor]

    def to_go(self, micro: MicroBatch) -> Tensor:
        """Return for each token the discounted rewards from its turn on, [M]."""
        reward_M = torch.zeros(len(micro.turn_M))
        for number, member_m in _tokens_by_trajectory(micro):
            reward_K = self.by_trajectory[number]
            # No reward follows the last judged turn, which is what turn -1 stands for.
            turn_m = np.where(micro.turn_M[member_m] < len(reward_K), micro.turn_M[member_m], -1)
            to_go_m = rewards_to_go(reward_K, torch.from_numpy(turn_m), discount=self.settings.discount)
            reward_M[member_m] = to_go_m.float()
        return reward_M

    def at_ends(self, micro: MicroBatch) -> Tensor:
        """Return the reward of each turn at its last token with loss, 0 elsewhere, [M].

        A turn without such a token gives its reward to the last one of an earlier turn, if there is any.
        """
        reward_M = torch.zeros(len(micro.turn_M), dtype=torch.float64)
        for number, member_m in _tokens_by_trajectory(micro):
            reward_K = self.by_trajectory[number]
            last_K = np.searchsorted(micro.turn_M[member_m], np.arange(len(reward_K)), side="right") - 1
            counts_K = last_K >= 0
            reward_M.index_add_(
                0, torch.from_numpy(member_m[last_K[counts_K]]), reward_K[torch.from_numpy(counts_K)]
            )
        return reward_M


def turn_rewards(settings: TurnsConfig, batch: TrainBatch) -> TurnRewards:
    """Return the rewards of the turns of each trajectory; of live trajectories none, which have advantages.

    Raises ValueError if no trajectory has any: the recipe asks for rewards that its workflow does not give.
    """
    of_prompts = [
        () if number in batch.turn_advantages else trajectory.turn_rewards
        for number, trajectory in enumerate(batch.trajectories)
    ]
    count_N = list(map(len, of_prompts))
    if not any(count_N) and len(batch.turn_advantages) < len(count_N):
        raise ValueError(
            "actor.turns asks for rewards of turns, and no trajectory of the batch has one: expected a "
            "rollout.workflow that sets Trajectory.turn_rewards"
        )
    reward_K = torch.tensor(
        [reward for rewards in of_prompts for _, reward in rewards],  # only live turns have None
        dtype=torch.float64,
    )
    if settings.baseline == "group":
        group_K = torch.from_numpy(np.repeat(batch.group_N, count_N))
        reward_K = ADVANTAGES["grpo"](reward_K, group_K, torch.ones_like(group_K)).double()
    return TurnRewards(settings, (settings.coefficient * reward_K).split(count_N))


def _tokens_by_trajectory(micro: MicroBatch) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each trajectory's place in the batch, and the indices of its tokens among the M."""
    for number in np.unique(micro.trajectory_M).tolist():
        yield number, np.flatnonzero(micro.trajectory_M == number)


# ---- penalties for leaving the reference


def kl_penalties(
    settings: KLConfig | None,
    microbatches: Sequence[MicroBatch],
    scores: Sequence[Scores],
    estimate: kl.Estimate | None = None,
) -> list[Tensor] | None:
    """Return the amount to subtract from the reward at each token, [M] for each micro-batch.

    None if the recipe has no penalty in the reward. ``estimate``: of ``actor.kl.penalty``.
    """
    if settings is None or settings.where != "reward":
        return None
    penalties: list[Tensor] = []
    for micro, score in zip(microbatches, scores, strict=True):
        assert score.reference_M is not None
        estimate_M = kl.estimate(old_logp(micro, score), score.reference_M, estimate or settings.estimator)
        penalties.append(settings.coefficient * estimate_M)
    return penalties


def penalised(
    reward_N: Tensor,
    microbatches: Sequence[MicroBatch],
    penalties: Sequence[Tensor],
    group: dist.ProcessGroup,
) -> Tensor:
    """Subtract the penalties of each trajectory's tokens, which are spread over ranks, from its reward [N].

    Collective over ``group``.
    """
    sums_N = penalties[0].new_zeros(len(reward_N), dtype=torch.float64)
    for micro, penalty_M in zip(microbatches, penalties, strict=True):
        sums_N.index_add_(0, torch.from_numpy(micro.trajectory_M).to(sums_N.device), penalty_M.double())
    dist.all_reduce(sums_N, group=group)
    return reward_N - sums_N.cpu()


def old_logp(micro: MicroBatch, score: Scores) -> Tensor:
    """Return log-probs [M] under the policy that the step starts from.

    If they were not computed, the behaviour log-probs stand for them.
    """
    if score.proximal_M is not None:
        return score.proximal_M
    behaviour_M = torch.from_numpy(micro.behaviour_logp_M)
    other_M = score.teacher_M if score.teacher_M is not None else score.reference_M
    return behaviour_M if other_M is None else behaviour_M.to(other_M)
