"""From rewards and from what models say about tokens to the advantage and the return of each token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.batch.train_batch import TrainBatch, TurnAdvantages
from slipstream.backend.objective.advantage import (
    ADVANTAGES,
    generalized_advantage,
    teacher_gap,
    weighted_sum,
)
from slipstream.backend.objective.kl import Estimate
from slipstream.backend.trainer.plugins import RankPlugins
from slipstream.backend.trainer.prepared import Scores, Targets
from slipstream.backend.trainer.rewards import (
    TurnRewards,
    kl_penalties,
    old_logp,
    penalised,
    trajectory_rewards,
    turn_rewards,
)
from slipstream.configs.schema import ActorConfig, CriticConfig
from slipstream.configs.schema.advantage import (
    AdvantageNorm,
    Estimator,
    ModelScores,
    RewardTerm,
    TeacherTerm,
)


def find_targets(
    actor: ActorConfig,
    critic: CriticConfig | None,
    batch: TrainBatch,
    microbatches: Sequence[MicroBatch],
    scores: Sequence[Scores],
    group: dist.ProcessGroup,
    plugins: RankPlugins | None = None,
    device: torch.device | None = None,
) -> list[Targets]:
    """Return the targets of this rank's micro-batches. Collective over ``group``, the data-parallel ranks.

    ``plugins``: what the recipe names by import path; None: nothing. ``device``: that of ``group``'s
    tensors; None: the CPU.
    """
    if actor.reward_term is None:
        targets = [Targets(torch.zeros(len(micro.target_M)), None) for micro in microbatches]
    else:
        estimate = plugins and plugins.penalty
        targets = _reward_targets(
            actor, critic, actor.reward_term, batch, microbatches, scores, group, estimate
        )
    targets = [
        _summed(actor, target, micro, score, plugins and plugins.term(batch, micro, score))
        for target, micro, score in zip(targets, microbatches, scores, strict=True)
    ]
    if actor.advantage_norm is None:
        return targets
    return _with_normalized(actor.advantage_norm, batch, microbatches, targets, group, device)


def _reward_targets(
    actor: ActorConfig,
    critic: CriticConfig | None,
    term: RewardTerm,
    batch: TrainBatch,
    microbatches: Sequence[MicroBatch],
    scores: Sequence[Scores],
    group: dist.ProcessGroup,
    estimate: Estimate | None,
) -> list[Targets]:
    """Return targets from rewards alone. Collective over ``group``. ``estimate``: of ``actor.kl.penalty``."""
    reward_N = trajectory_rewards(actor, batch)
    turns = None if actor.turns is None else turn_rewards(actor.turns, batch)
    penalties = kl_penalties(actor.kl, microbatches, scores, estimate)
    if term.estimator == "gae":
        assert critic is not None
        return _token_targets(critic, reward_N, turns, microbatches, scores, penalties, group)
    penalty_N = torch.zeros_like(reward_N)
    if penalties is not None:
        penalty_N = reward_N - penalised(reward_N, microbatches, penalties, group)
    targets = _trajectory_targets(term, batch, reward_N - penalty_N, turns, microbatches)
    if batch.turn_advantages:
        targets = with_live_turns(batch.turn_advantages, penalty_N, microbatches, targets)
    return targets


def _summed(
    actor: ActorConfig, rewarded: Targets, micro: MicroBatch, score: Scores, own_M: Tensor | None
) -> Targets:
    """Return targets with the weighted sum of all terms as the advantage, and the terms as metrics.

    ``rewarded``: targets from rewards. ``own_M``: the term of the user's; None: the recipe has none.
    """
    terms: dict[str, tuple[float, Tensor]] = {}
    measured: dict[str, Tensor] = {}
    if actor.reward_term is not None:
        terms["reward"] = actor.reward_term.weight, rewarded.advantage_M
    if actor.teacher_term is not None:
        taught = _taught(actor.teacher_term, micro, score)
        terms["teacher"] = actor.teacher_term.weight, taught.gap_M
        measured |= {
            "teacher_fraction": taught.has_M.float(),
            "teacher_clipped_fraction": taught.clipped_M.float(),
        }
    if actor.plugin_term is not None and own_M is not None:
        terms["plugin"] = actor.plugin_term.weight, own_M
    device = terms["teacher"][1].device if "teacher" in terms else rewarded.advantage_M.device
    parts = [(weight, value_M.to(device)) for weight, value_M in terms.values()]
    for name, (weight, value_M) in zip(terms, parts, strict=True):
        term_M = weight * value_M
        measured |= {f"{name}_mean": term_M, f"{name}_abs_mean": term_M.abs()}
    advantage_M = weighted_sum(parts) if parts else rewarded.advantage_M
    return replace(rewarded, advantage_M=advantage_M, measured=measured)


@dataclass(frozen=True)
class _Taught:
    """The teacher's term of the M tokens of a micro-batch."""

    gap_M: Tensor
    """log pi_teacher - log pi_old, clipped; 0 where the teacher has no log-prob."""
    has_M: Tensor
    clipped_M: Tensor


def _taught(term: TeacherTerm, micro: MicroBatch, score: Scores) -> _Taught:
    if isinstance(term.scores, ModelScores):
        assert score.teacher_M is not None
        gap_M = teacher_gap(score.teacher_M, old_logp(micro, score))
        has_M = torch.ones_like(gap_M, dtype=torch.bool)
    else:
        old_M = old_logp(micro, score)
        logp_M = np.full(len(micro.target_M), np.nan, np.float32)
        if micro.teacher is not None:
            logp_M = micro.teacher.logp_T
        teacher_M = torch.from_numpy(logp_M).to(old_M.device)
        has_M = ~teacher_M.isnan()
        # A fault of the policy's own log-probs must stay one.
        gap_M = torch.where(has_M, teacher_gap(teacher_M, old_M), 0)
    if term.clip is None:
        return _Taught(gap_M, has_M, torch.zeros_like(has_M))
    return _Taught(gap_M.clamp(-term.clip, term.clip), has_M, gap_M.abs() > term.clip)


def _trajectory_targets(
    term: RewardTerm,
    batch: TrainBatch,
    reward_N: Tensor,
    turns: TurnRewards | None,
    microbatches: Sequence[MicroBatch],
) -> list[Targets]:
    """One advantage for all tokens of an episode, plus one for all tokens of a turn."""
    tokens_N = torch.tensor([trajectory.response_length for trajectory in batch.trajectories])
    # Statistics of the batch are about groups of prompts only.
    tokens_N[list(batch.turn_advantages)] = 0
    advantage_N = _episode_advantages(term.estimator, batch, reward_N, tokens_N) + term.shift
    targets: list[Targets] = []
    for micro in microbatches:
        advantage_M = advantage_N[torch.from_numpy(micro.trajectory_M)]
        if turns is not None:
            coefficient = turns.settings.reward_coefficient
            advantage_M = weighted_sum([(coefficient, advantage_M), (1.0, turns.to_go(micro))])
        targets.append(Targets(advantage_M, None))
    return targets


def _episode_advantages(
    estimator: Estimator, batch: TrainBatch, reward_N: Tensor, tokens_N: Tensor
) -> Tensor:
    """Return the advantage of each trajectory, [N]: that of its episode, whose reward is the mean of those of
    its trajectories."""
    if batch.given_rewards is not None:
        return torch.tensor(batch.given_rewards, dtype=torch.float32)
    first_E = np.unique(batch.episode_N, return_index=True)[1]
    episode_N = torch.from_numpy(batch.episode_N)
    count_E = episode_N.bincount()
    reward_E = reward_N.new_zeros(len(first_E)).index_add_(0, episode_N, reward_N) / count_E
    tokens_E = tokens_N.new_zeros(len(first_E)).index_add_(0, episode_N, tokens_N)
    return ADVANTAGES[estimator](reward_E, torch.from_numpy(batch.group_N[first_E]), tokens_E)[episode_N]


def with_live_turns(
    turn_advantages: TurnAdvantages,
    penalty_N: Tensor,
    microbatches: Sequence[MicroBatch],
    targets: Sequence[Targets],
) -> list[Targets]:
    """Replace the advantages of live trajectories: each token gets that of its own turn.

    A turn's worth does not depend on which others happen to be trained with it, so that no turn gets a
    share of the next one's. A turn without a score has the advantage 0. ``penalty_N``: for leaving the
    reference.
    """
    replaced: list[Targets] = []
    for micro, target in zip(microbatches, targets, strict=True):
        advantage_M = target.advantage_M.clone()
        for number, by_turn in turn_advantages.items():
            member_m = np.flatnonzero(micro.trajectory_M == number)
            turn_m = torch.from_numpy(micro.turn_M[member_m])
            scored_K = [(score is not None, score or 0.0) for score in by_turn]
            is_scored_K, own_K = torch.tensor(scored_K, dtype=torch.float64).T
            own_m = (own_K[turn_m] - penalty_N[number]) * is_scored_K[turn_m]
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
    whitened = normalized_over_tokens([target.advantage_M for target in targets], group)
    return [
        Targets(advantage_M, target.return_M) for advantage_M, target in zip(whitened, targets, strict=True)
    ]


def _with_normalized(
    norm: AdvantageNorm,
    batch: TrainBatch,
    microbatches: Sequence[MicroBatch],
    targets: Sequence[Targets],
    group: dist.ProcessGroup,
    device: torch.device | None,
) -> list[Targets]:
    """Normalize the advantages of all tokens but those of live users, whose turns do not depend on which
    others are trained with them. Collective over ``group``.
    """
    values = [target.advantage_M.to(device=device) for target in targets]
    live = list(batch.turn_advantages)
    counts = [
        torch.from_numpy(~np.isin(micro.trajectory_M, live)).to(device=device) for micro in microbatches
    ]
    normalized = normalized_over_tokens(
        [value_M[counts_M] for value_M, counts_M in zip(values, counts, strict=True)],
        group,
        mean=norm.mean,
        deviation=norm.deviation,
        eps=norm.eps,
    )
    return [
        replace(target, advantage_M=value_M.masked_scatter(counts_M, normalized_m.to(value_M)))
        for target, value_M, counts_M, normalized_m in zip(targets, values, counts, normalized, strict=True)
    ]


def normalized_over_tokens(
    values: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    mean: bool = True,
    deviation: bool = True,
    eps: float = 1e-8,
) -> list[Tensor]:
    """Return (value - mean) / (standard deviation + eps) over all tokens of all ranks, float32. Collective.

    Without ``mean`` nothing is subtracted, and without ``deviation`` nothing is divided. The deviation is
    about the mean in any case, and divides the sum of squares by the number of tokens.
    """
    every = torch.cat([value_M.double() for value_M in values])
    sums = torch.stack([every.new_tensor(float(len(every))), every.sum()])
    dist.all_reduce(sums, group=group)
    count, centre = sums[0].clamp(min=1), sums[1] / sums[0].clamp(min=1)
    scale = torch.ones_like(count)
    if deviation:
        spread = ((every - centre) ** 2).sum()
        dist.all_reduce(spread, group=group)
        scale = (spread / count).sqrt() + eps
    shift = centre if mean else torch.zeros_like(centre)
    return [((value_M.double() - shift) / scale).float() for value_M in values]
