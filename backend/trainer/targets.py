"""From rewards and from what models say about tokens to the advantage and the return of each token."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.objective.advantage import (
    ADVANTAGES,
    generalized_advantage,
    teacher_gap,
    weighted_sum,
)
from slipstream.backend.trainer.prepared import Scores, Targets
from slipstream.backend.trainer.rewards import (
    TurnRewards,
    kl_penalties,
    old_logp,
    penalised,
    trajectory_rewards,
    turn_rewards,
)
from slipstream.configs.schema import CriticConfig, RunConfig, TeacherConfig


def find_targets(
    config: RunConfig,
    batch: TrainBatch,
    microbatches: Sequence[MicroBatch],
    scores: Sequence[Scores],
    group: dist.ProcessGroup,
) -> list[Targets]:
    """Return the targets of this rank's micro-batches. Collective over ``group``, the data-parallel ranks."""
    actor = config.actor
    reward_N = trajectory_rewards(actor, batch)
    turns = None if actor.turns is None else turn_rewards(actor.turns, batch)
    penalties = kl_penalties(actor.kl, microbatches, scores)
    if actor.advantage == "gae":
        assert config.critic is not None
        targets = _token_targets(config.critic, reward_N, turns, microbatches, scores, penalties, group)
    else:
        penalty_N = torch.zeros_like(reward_N)
        if penalties is not None:
            penalty_N = reward_N - penalised(reward_N, microbatches, penalties, group)
        targets = _trajectory_targets(actor.advantage, batch, reward_N - penalty_N, turns, microbatches)
        if batch.turn_advantages:
            targets = with_live_turns(batch.turn_advantages, penalty_N, microbatches, targets)
    if actor.teacher is None:
        return targets
    return [
        replace(target, advantage_M=_taught(actor.teacher, target.advantage_M, micro, score))
        for micro, score, target in zip(microbatches, scores, targets, strict=True)
    ]


def _trajectory_targets(
    advantage: str,
    batch: TrainBatch,
    reward_N: Tensor,
    turns: TurnRewards | None,
    microbatches: Sequence[MicroBatch],
) -> list[Targets]:
    """One advantage for all tokens of an episode, plus one for all tokens of a turn."""
    tokens_N = torch.tensor([trajectory.response_length for trajectory in batch.trajectories])
    # Statistics of the batch are about groups of prompts only.
    tokens_N[list(batch.turn_advantages)] = 0
    advantage_N = _episode_advantages(advantage, batch, reward_N, tokens_N)
    targets: list[Targets] = []
    for micro in microbatches:
        advantage_M = advantage_N[torch.from_numpy(micro.trajectory_M)]
        if turns is not None:
            coefficient = turns.settings.reward_coefficient
            advantage_M = weighted_sum([(coefficient, advantage_M), (1.0, turns.to_go(micro))])
        targets.append(Targets(advantage_M, None))
    return targets


def _episode_advantages(advantage: str, batch: TrainBatch, reward_N: Tensor, tokens_N: Tensor) -> Tensor:
    """Return the advantage of each trajectory, [N]: that of its episode, whose reward is the mean of those of
    its trajectories."""
    if batch.given_rewards is not None:
        return torch.tensor(batch.given_rewards, dtype=torch.float32)
    first_E = np.unique(batch.episode_N, return_index=True)[1]
    episode_N = torch.from_numpy(batch.episode_N)
    count_E = episode_N.bincount()
    reward_E = reward_N.new_zeros(len(first_E)).index_add_(0, episode_N, reward_N) / count_E
    tokens_E = tokens_N.new_zeros(len(first_E)).index_add_(0, episode_N, tokens_N)
    return ADVANTAGES[advantage](reward_E, torch.from_numpy(batch.group_N[first_E]), tokens_E)[episode_N]


def with_live_turns(
    turn_advantages: Mapping[int, tuple[float, ...]],
    penalty_N: Tensor,
    microbatches: Sequence[MicroBatch],
    targets: Sequence[Targets],
) -> list[Targets]:
    """Replace the advantages of live trajectories: each token gets that of its own turn.

    A turn's worth does not depend on which others happen to be trained with it, so that no turn gets a
    share of the next one's. ``penalty_N``: for leaving the reference.
    """
    replaced: list[Targets] = []
    for micro, target in zip(microbatches, targets, strict=True):
        advantage_M = target.advantage_M.clone()
        for number, by_turn in turn_advantages.items():
            member_m = np.flatnonzero(micro.trajectory_M == number)
            turn_m = torch.from_numpy(micro.turn_M[member_m])
            own_m = torch.tensor(by_turn, dtype=torch.float64)[turn_m] - penalty_N[number]
            advantage_M[torch.from_numpy(member_m)] = own_m.to(advantage_M)
        replaced.append(replace(target, advantage_M=advantage_M))
    return replaced


def _token_targets(
    critic: CriticConfig,
    reward_N: Tensor,
    turns: TurnRewards | None,
    microbatches: Sequence[MicroBatch],
    scores: Sequence[Scores],
    penalties: Sequence[Tensor] | None,
    group: dist.ProcessGroup,
) -> list[Targets]:
    """GAE from the critic's values, whitened over the tokens of the batch."""
    if turns is not None:
        reward_N = turns.settings.reward_coefficient * reward_N
    targets: list[Targets] = []
    for number, (micro, score) in enumerate(zip(microbatches, scores, strict=True)):
        value_M = score.value_M
        assert value_M is not None
        owner_M, trajectory_M, is_last_M = (
            torch.from_numpy(x).to(value_M.device)
            for x in (micro.owner_M, micro.trajectory_M, micro.is_last_M)
        )
        reward_M = torch.where(is_last_M, reward_N.to(value_M)[trajectory_M], 0)
        if turns is not None:
            reward_M = reward_M + turns.at_ends(micro).to(value_M)
        if penalties is not None:
            reward_M = reward_M - penalties[number]
        advantage_M = generalized_advantage(
            reward_M, value_M, owner_M, discount=critic.discount, decay=critic.gae_lambda
        )
        targets.append(Targets(advantage_M, advantage_M + value_M))
    whitened = _whitened([target.advantage_M for target in targets], group)
    return [
        Targets(advantage_M, target.return_M) for advantage_M, target in zip(whitened, targets, strict=True)
    ]


def _whitened(values: Sequence[Tensor], group: dist.ProcessGroup, eps: float = 1e-8) -> list[Tensor]:
    """Return (value - mean) / (standard deviation + eps) over all tokens of all ranks. Collective."""
    every = torch.cat([value_M.double() for value_M in values])
    sums = torch.stack([every.new_tensor(float(len(every))), every.sum()])
    dist.all_reduce(sums, group=group)
    count, mean = sums[0].clamp(min=1), sums[1] / sums[0].clamp(min=1)
    spread = ((every - mean) ** 2).sum()
    dist.all_reduce(spread, group=group)
    scale = (spread / count).sqrt() + eps
    return [((value_M.double() - mean) / scale).float() for value_M in values]


def _taught(teacher: TeacherConfig, advantage_M: Tensor, micro: MicroBatch, score: Scores) -> Tensor:
    """Return the advantage with the teacher's part added, [M]."""
    assert score.teacher_M is not None
    gap_M = teacher_gap(score.teacher_M, old_logp(micro, score))
    return weighted_sum([(teacher.reward_coefficient, advantage_M.to(gap_M)), (teacher.coefficient, gap_M)])
