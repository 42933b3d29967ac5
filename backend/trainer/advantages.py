"""From rewards, and from what models say about tokens, to the advantage of each token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.objective import kl
from slipstream.backend.objective.advantage import (
    ADVANTAGES,
    generalized_advantage,
    overlong_penalty,
    rewards_to_go,
    teacher_gap,
    weighted_sum,
)
from slipstream.configs.schema import RunConfig, TeacherConfig, TurnsConfig


@dataclass(frozen=True)
class Scores:
    """What models say about the M tokens of a micro-batch that carry loss; None: they were not asked.

    float32 [M] each.
    """

    proximal_M: Tensor | None
    """Log-probs under the policy that the step starts from."""
    reference_M: Tensor | None
    teacher_M: Tensor | None
    value_M: Tensor | None


@dataclass(frozen=True)
class Targets:
    advantage_M: Tensor
    return_M: Tensor | None
    """What the critic is to say; None without one."""


def rewards(config: RunConfig, batch: TrainBatch) -> Tensor:
    """Of each trajectory, less a penalty for its length; float64 [N]."""
    reward_N = torch.tensor([trajectory.reward for trajectory in batch.trajectories], dtype=torch.float64)
    overlong = config.actor.overlong
    if overlong is not None:
        length_N = torch.tensor([trajectory.sampled_length for trajectory in batch.trajectories])
        reward_N = reward_N - overlong_penalty(length_N, **overlong.model_dump())
    return reward_N


def turn_rewards(settings: TurnsConfig, batch: TrainBatch) -> list[Tensor]:
    """Of each trajectory the rewards of its turns, float64 [K], as much as they count.

    Raises ValueError when no trajectory has any: whoever asked for them has a workflow that gives none.
    """
    count_N = [len(trajectory.turn_rewards) for trajectory in batch.trajectories]
    if not any(count_N):
        raise ValueError(
            "actor.turns asks for rewards of turns, and no trajectory of the batch has one: expected a "
            "rollout.workflow that sets Trajectory.turn_rewards"
        )
    reward_K = torch.tensor(
        [reward for trajectory in batch.trajectories for _, reward in trajectory.turn_rewards],
        dtype=torch.float64,
    )
    if settings.baseline == "group":
        group_K = torch.from_numpy(np.repeat(batch.group_N, count_N))
        reward_K = ADVANTAGES["grpo"](reward_K, group_K, torch.ones_like(group_K)).double()
    return list((settings.coefficient * reward_K).split(count_N))


def find_targets(
    config: RunConfig,
    batch: TrainBatch,
    microbatches: Sequence[MicroBatch],
    scores: Sequence[Scores],
    group: dist.ProcessGroup,
) -> list[Targets]:
    """Of each of this rank's micro-batches. Collective over ``group``, the data-parallel ranks."""
    actor = config.actor
    reward_N = rewards(config, batch)
    penalty: list[Tensor | None] = [None] * len(microbatches)
    if actor.kl is not None and actor.kl.where == "reward":
        penalty = [_penalty(config, micro, score) for micro, score in zip(microbatches, scores, strict=True)]
    turns = None if actor.turns is None else turn_rewards(actor.turns, batch)
    if actor.advantage == "gae":
        found = _of_tokens(config, reward_N, turns, microbatches, scores, penalty, group)
    else:
        reward_N = _penalised(reward_N, microbatches, penalty, group)
        found = _of_trajectories(config, batch, reward_N, turns, microbatches)
    if actor.teacher is None:
        return found
    return [
        replace(targets, advantage_M=_taught(actor.teacher, targets.advantage_M, micro, score))
        for micro, score, targets in zip(microbatches, scores, found, strict=True)
    ]


def _taught(teacher: TeacherConfig, advantage_M: Tensor, micro: MicroBatch, score: Scores) -> Tensor:
    gap_M = teacher_gap(score.teacher_M, _old(micro, score))
    return weighted_sum([(teacher.reward_coefficient, advantage_M.to(gap_M)), (teacher.coefficient, gap_M)])


def _old(micro: MicroBatch, score: Scores) -> Tensor:
    """Log-probs of the policy as the step finds it; the sampling policy's where they were not computed."""
    if score.proximal_M is not None:
        return score.proximal_M
    asked = score.teacher_M if score.teacher_M is not None else score.reference_M
    return torch.from_numpy(micro.behaviour_logp_M).to(asked)


def _penalty(config: RunConfig, micro: MicroBatch, score: Scores) -> Tensor:
    """What to subtract from the reward at each token [M]."""
    settings = config.actor.kl
    return settings.coefficient * kl.estimate(_old(micro, score), score.reference_M, settings.estimator)


def _penalised(
    reward_N: Tensor,
    microbatches: Sequence[MicroBatch],
    penalty: Sequence[Tensor | None],
    group: dist.ProcessGroup,
) -> Tensor:
    """The trajectories' own, less the sums over their tokens, which are spread over ranks."""
    sums_N = None
    for micro, penalty_M in zip(microbatches, penalty, strict=True):
        if penalty_M is not None:
            if sums_N is None:
                sums_N = penalty_M.new_zeros(len(reward_N), dtype=torch.float64)
            sums_N.index_add_(0, torch.from_numpy(micro.trajectory_M).to(sums_N.device), penalty_M.double())
    if sums_N is None:
        return reward_N
    dist.all_reduce(sums_N, group=group)
    return reward_N - sums_N.cpu()


def _of_trajectories(
    config: RunConfig,
    batch: TrainBatch,
    reward_N: Tensor,
    turns: Sequence[Tensor] | None,
    microbatches: Sequence[MicroBatch],
) -> list[Targets]:
    """The same for all tokens of a trajectory, or of a turn of it."""
    tokens_N = torch.tensor([trajectory.response_length for trajectory in batch.trajectories])
    advantage_N = ADVANTAGES[config.actor.advantage](reward_N, torch.from_numpy(batch.group_N), tokens_N)
    found = [advantage_N[torch.from_numpy(micro.trajectory_M)] for micro in microbatches]
    if turns is not None:
        settings = config.actor.turns
        found = [
            weighted_sum(
                [
                    (settings.reward_coefficient, advantage_M),
                    (1.0, _from_turns(turns, micro, settings.discount)),
                ]
            )
            for micro, advantage_M in zip(microbatches, found, strict=True)
        ]
    return [Targets(advantage_M, None) for advantage_M in found]


def _from_turns(turns: Sequence[Tensor], micro: MicroBatch, discount: float) -> Tensor:
    """Of each token the discounted rewards from its turn on, [M]."""
    found_M = torch.zeros(len(micro.turn_M))
    for number, of_M in _by_trajectory(micro):
        # Behind the last turn nothing follows, which is what -1 stands for.
        turn_M = np.where(micro.turn_M[of_M] < len(turns[number]), micro.turn_M[of_M], -1)
        found_M[of_M] = rewards_to_go(turns[number], torch.from_numpy(turn_M), discount=discount).float()
    return found_M


def _at_ends_of_turns(turns: Sequence[Tensor], micro: MicroBatch) -> Tensor:
    """The reward of each turn at its last token, [M]; at an earlier one's where it has no token with loss."""
    found_M = torch.zeros(len(micro.turn_M), dtype=torch.float64)
    for number, of_M in _by_trajectory(micro):
        last_K = np.searchsorted(micro.turn_M[of_M], np.arange(len(turns[number])), side="right") - 1
        counts = last_K >= 0
        found_M.index_add_(0, torch.from_numpy(of_M[last_K[counts]]), turns[number][torch.from_numpy(counts)])
    return found_M


def _by_trajectory(micro: MicroBatch) -> Iterator[tuple[int, np.ndarray]]:
    """The trajectories of a micro-batch, by place in the batch, and which of the M tokens are theirs."""
    for number in np.unique(micro.trajectory_M).tolist():
        yield number, np.flatnonzero(micro.trajectory_M == number)


def _of_tokens(
    config: RunConfig,
    reward_N: Tensor,
    turns: Sequence[Tensor] | None,
    microbatches: Sequence[MicroBatch],
    scores: Sequence[Scores],
    penalty: Sequence[Tensor | None],
    group: dist.ProcessGroup,
) -> list[Targets]:
    """GAE from a critic's values, whitened over the tokens of the batch."""
    critic = config.critic
    assert critic is not None
    found = []
    if turns is not None:
        reward_N = config.actor.turns.reward_coefficient * reward_N
    for micro, score, penalty_M in zip(microbatches, scores, penalty, strict=True):
        value_M = score.value_M
        owner_M, trajectory_M, is_last_M = (
            torch.from_numpy(x).to(value_M.device)
            for x in (micro.owner_M, micro.trajectory_M, micro.is_last_M)
        )
        reward_M = torch.where(is_last_M, reward_N.to(value_M)[trajectory_M], 0)
        if turns is not None:
            reward_M = reward_M + _at_ends_of_turns(turns, micro).to(value_M)
        if penalty_M is not None:
            reward_M = reward_M - penalty_M
        advantage_M = generalized_advantage(
            reward_M, value_M, owner_M, discount=critic.discount, decay=critic.gae_lambda
        )
        found.append(Targets(advantage_M, advantage_M + value_M))
    whitened = _whitened([targets.advantage_M for targets in found], group)
    return [
        Targets(advantage_M, targets.return_M) for advantage_M, targets in zip(whitened, found, strict=True)
    ]


def _whitened(values: Sequence[Tensor], group: dist.ProcessGroup, eps: float = 1e-8) -> list[Tensor]:
    """(value - mean) / (standard deviation + eps) over all tokens of all ranks. Collective."""
    every = torch.cat([value_M.double() for value_M in values])
    sums = torch.stack([every.new_tensor(float(len(every))), every.sum()])
    dist.all_reduce(sums, group=group)
    count, mean = sums[0].clamp(min=1), sums[1] / sums[0].clamp(min=1)
    spread = ((every - mean) ** 2).sum()
    dist.all_reduce(spread, group=group)
    scale = (spread / count).sqrt() + eps
    return [((value_M.double() - mean) / scale).float() for value_M in values]
