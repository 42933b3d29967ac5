"""The terms of an advantage: each is what a formula by hand gives, and the advantage is their sum."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slipstream.backend.batch.micro_batch import assemble
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.trainer.prepared import Scores
from slipstream.backend.trainer.targets import find_targets
from slipstream.configs.schema import ActorConfig
from slipstream.configs.schema.advantage import (
    AdvantageNorm,
    ModelScores,
    RewardTerm,
    TeacherTerm,
    TopTokensTerm,
)
from slipstream.rollout.tokens.teacher import TeacherScores
from slipstream.rollout.tokens.trajectory import Trajectory, joined
from tests.unit.test_trainer_live_turns import LIVE, PROMPTS, live, of_prompt

NAN = math.nan
BEHAVIOUR = -1.0
"""Behaviour log-prob of every sampled token."""


def taught(trajectory: Trajectory, *logps: float, k: int = 0) -> Trajectory:
    """Return the trajectory with these log-probs of the tokens that carry loss."""
    logp_T = np.full(len(trajectory.tokens_T), NAN, np.float32)
    logp_T[trajectory.loss_mask_T] = logps
    ids = np.arange(k, dtype=np.int32)[None].repeat(len(logp_T), 0)
    tops = np.where(trajectory.loss_mask_T[:, None], np.float32(-3), np.float32(NAN)).repeat(k, 1)
    return replace(trajectory, teacher=TeacherScores(logp_T, ids, tops))


def found(actor: ActorConfig, batch: TrainBatch, packs=None, multiple: int = 1, old: float | None = None):
    """Return advantages, and what is measured, by trajectory. ``old``: proximal log-prob of every token."""
    packs = packs or [list(range(len(batch.trajectories)))]
    micros = [assemble(batch, pack, 4 * multiple, trajectory_multiple=multiple) for pack in packs]
    scores = []
    for micro in micros:
        proximal_M = None if old is None else torch.full((len(micro.target_M),), old)
        teacher_M = torch.full((len(micro.target_M),), -2.5) if actor.teacher_model is not None else None
        scores.append(Scores(proximal_M, None, teacher_M, None))
    targets = find_targets(actor, None, batch, micros, scores, None)
    advantages: dict[int, list[float]] = {}
    measured: dict[str, dict[int, list[float]]] = {}
    for micro, target in zip(micros, targets, strict=True):
        for place, number in enumerate(micro.trajectory_M.tolist()):
            advantages.setdefault(number, []).append(target.advantage_M[place].item())
            for name, value_M in target.measured.items():
                measured.setdefault(name, {}).setdefault(number, []).append(value_M[place].item())
    return advantages, measured


def batch_of(*trajectories: Trajectory, group, turn_advantages=None) -> TrainBatch:
    return TrainBatch(0, trajectories, np.array(group), turn_advantages=turn_advantages or {})


REWARDS = RewardTerm(weight=2.0, estimator="dr_grpo")
PAIR = (taught(of_prompt(1.0), -1.5, NAN, -9.0), of_prompt(0.0))


@pytest.mark.parametrize("packs", [[[0, 1]], [[1], [0]]])
@pytest.mark.parametrize("multiple", [1, 4])
def test_terms_are_those_by_hand_and_add_up_whatever_the_packs(packs, multiple):
    actor = ActorConfig(advantage=[REWARDS, TeacherTerm(weight=0.5, clip=5.0)])
    advantages, measured = found(actor, batch_of(*PAIR, group=[8, 8]), packs, multiple)
    # Gaps to the behaviour policy: -0.5, none, -8 clipped to -5.
    assert measured["reward_mean"] == {0: [1.0] * 3, 1: [-1.0] * 3}
    assert measured["teacher_mean"] == {0: [-0.25, 0.0, -2.5], 1: [0.0] * 3}
    assert measured["teacher_abs_mean"] == {0: [0.25, 0.0, 2.5], 1: [0.0] * 3}
    assert measured["teacher_fraction"] == {0: [1.0, 0.0, 1.0], 1: [0.0] * 3}
    assert measured["teacher_clipped_fraction"] == {0: [0.0, 0.0, 1.0], 1: [0.0] * 3}
    assert advantages == {0: [0.75, 1.0, -1.5], 1: [-1.0] * 3}


def test_the_gap_is_to_the_policy_that_the_step_starts_from_where_that_is_known():
    actor = ActorConfig(advantage=[TeacherTerm(clip=None)])
    advantages, _ = found(actor, batch_of(*PAIR, group=[8, 8]), old=-2.0)
    assert advantages == {0: [0.5, 0.0, -7.0], 1: [0.0] * 3}


def test_a_teacher_on_the_ranks_scores_every_token_and_is_clipped_on_both_sides():
    source = ModelScores(path="nowhere")
    for old, expected in ((-1.0, -1.0), (-4.0, 1.0), (-2.25, -0.25)):
        actor = ActorConfig(advantage=[TeacherTerm(clip=1.0, scores=source)])
        advantages, measured = found(actor, batch_of(*PAIR, group=[8, 8]), old=old)
        assert advantages == {0: [expected] * 3, 1: [expected] * 3}
        assert measured["teacher_fraction"][1] == [1.0] * 3


def test_a_fault_of_a_teacher_on_the_ranks_is_no_missing_value(monkeypatch):
    actor = ActorConfig(advantage=[TeacherTerm(scores=ModelScores(path="nowhere"))])
    monkeypatch.setattr(torch, "full", lambda shape, value: torch.ones(shape) * NAN)
    advantages, _ = found(actor, batch_of(*PAIR, group=[8, 8]))
    assert all(map(math.isnan, advantages[1]))


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_pp", "reward"])
def test_a_single_term_from_rewards_is_bit_for_bit_what_the_estimator_gives(estimator):
    batch = batch_of(*PROMPTS, group=[8, 8, 9, 9])
    alone = ActorConfig(advantage=[RewardTerm(estimator=estimator)])
    both = ActorConfig(advantage=[TeacherTerm(), RewardTerm(estimator=estimator), TopTokensTerm()])
    advantages, measured = found(alone, batch)
    assert advantages == found(both, batch)[0] == measured["reward_mean"]


def test_each_live_turn_trains_what_it_has():
    turns = live((2, 10.0), (3, -10.0), (1, 5.0))
    values = [-0.5, -1.5, NAN, NAN, NAN, -3.0]
    turns = replace(taught(turns, *values), turn_rewards=turns.turn_rewards)
    batch = batch_of(*PROMPTS, turns, LIVE[1], group=[8, 8, 9, 9, -1, -2])
    batch = replace(batch, turn_advantages={4: (None, 1.5, -0.5), 5: (0.75,)})
    both = ActorConfig(advantage=[RewardTerm(), TeacherTerm(weight=2.0)])
    advantages, measured = found(both, batch)
    assert advantages[4] == [1.0, -1.0, 1.5, 1.5, 1.5, -4.5]
    assert measured["reward_mean"][4] == [0.0, 0.0, 1.5, 1.5, 1.5, -0.5]
    assert advantages[5] == [0.75] * 4
    groups, _ = found(both, batch_of(*PROMPTS, group=[8, 8, 9, 9]))
    assert {number: advantages[number] for number in range(4)} == groups
    alone, measured = found(ActorConfig(advantage=[TeacherTerm()]), batch)
    assert alone[4] == [0.5, -0.5, 0.0, 0.0, 0.0, -2.0]
    assert "reward_mean" not in measured


def test_a_batch_of_live_turns_without_any_score_has_the_teacher_alone():
    turns = replace(taught(live((2, 0.0)), -0.5, -3.0), reward=None)
    turns = replace(turns, turn_rewards=tuple((end, None) for end, _ in turns.turn_rewards))
    batch = batch_of(turns, group=[-1], turn_advantages={0: (None,)})
    advantages, _ = found(ActorConfig(advantage=[RewardTerm(), TeacherTerm()]), batch)
    assert advantages == {0: [0.5, -2.0]}


def test_likeliest_tokens_reach_the_tokens_that_they_are_about_through_packs_and_siblings():
    first, second = taught(of_prompt(1.0), -1.0, -1.0, -1.0, k=2), taught(of_prompt(0.0), *[-2.0] * 3, k=3)
    parts = joined([first, of_prompt(0.5)]).split()
    batch = batch_of(*parts, second, group=[8, 8, 8])
    micro = assemble(batch, [2, 1, 0], 16, trajectory_multiple=4)
    teacher = micro.teacher
    assert teacher is not None and teacher.k == 3
    by_trajectory = {0: 2, 1: 0, 2: 3}
    known_M = (~np.isnan(teacher.top_logp_TK)).sum(1)
    assert known_M.tolist() == [by_trajectory[number] for number in micro.trajectory_M.tolist()]
    assert teacher.logp_T[micro.trajectory_M == 2].tolist() == [-2.0] * 3
    assert assemble(batch, [1], 4).teacher is not None  # a sibling of one that has scores
    assert assemble(batch_of(*PROMPTS, group=[0] * 4), [0, 1], 4).teacher is None


@pytest.mark.parametrize("packs", [[[0, 1, 2, 3, 4]], [[4], [1, 3], [2, 0]]])
@pytest.mark.parametrize(("mean", "deviation"), [(True, True), (True, False), (False, True)])
def test_the_sum_of_terms_is_normalized_over_the_tokens_of_the_batch(monkeypatch, packs, mean, deviation):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)  # there is one rank
    terms = [RewardTerm(estimator="dr_grpo"), TeacherTerm(weight=0.5, clip=None)]
    batch = batch_of(*PAIR, *PROMPTS[:2], LIVE[1], group=[8, 8, 9, 9, -1], turn_advantages={4: (0.75,)})
    norm = AdvantageNorm(mean=mean, deviation=deviation, eps=0.25)
    plain, measured = found(ActorConfig(advantage=terms), batch, packs)
    actual, unchanged = found(ActorConfig(advantage=terms, advantage_norm=norm), batch, packs)
    every = np.concatenate([plain[number] for number in range(4)]).astype(np.float64)
    centre, scale = every.mean() if mean else 0.0, every.std() + 0.25 if deviation else 1.0
    for number in range(4):
        expected = (np.array(plain[number]) - centre) / scale
        np.testing.assert_allclose(actual[number], expected, rtol=1e-6, atol=1e-7)
    assert actual[4] == plain[4] == [0.75] * 4  # a live turn has what its judge says
    assert unchanged == measured
