"""Advantages in a batch of groups and of live turns: neither kind changes those of the other."""

import numpy as np
import pytest
import torch

from slipstream.backend.batch.micro_batch import assemble
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.objective.advantage import ADVANTAGES
from slipstream.backend.trainer.prepared import Scores
from slipstream.backend.trainer.targets import find_targets
from slipstream.configs.schema import ActorConfig, KLConfig, TurnsConfig
from slipstream.configs.schema.advantage import RewardTerm
from slipstream.rollout.tokens.trajectory import (
    UNSAMPLED,
    Completion,
    Finish,
    Span,
    Trajectory,
    TrajectoryBuilder,
)


def said(tokens: int) -> Completion:
    return Completion(tuple(range(tokens)), (-1.0,) * tokens, (Span(0, 0, tokens),), Finish.STOP)


def of_prompt(reward: float, tokens: int = 3, *turns: float) -> Trajectory:
    builder = TrajectoryBuilder([1, 2])
    for turn in turns or (None,):
        builder.add_completion(said(tokens))
        if turn is not None:
            builder.reward_turn(turn)
    return builder.build().judged(reward)


def live(*turns: tuple[int, float]) -> Trajectory:
    """Turns of (tokens, score); a turn of context that was trained before stands in front."""
    lengths = [2, *(length for tokens, _ in turns for length in (1, tokens))]
    carries_loss = [False, *([False, True] * len(turns))]
    mask_T = np.repeat(carries_loss, lengths)
    ends = np.cumsum([1 + tokens for tokens, _ in turns]) + 2
    return Trajectory(
        np.arange(len(mask_T)),
        mask_T,
        np.where(mask_T, -1.0, 0).astype(np.float32),
        np.where(mask_T, 0, UNSAMPLED).astype(np.int32),
        Finish.STOP,
        reward=float(np.mean([score for _, score in turns])),
        turn_rewards=tuple((int(end), score) for end, (_, score) in zip(ends, turns, strict=True)),
    )


PROMPTS = (of_prompt(1.0), of_prompt(0.0), of_prompt(0.25, 5), of_prompt(0.5))
LIVE = (live((2, 10.0), (3, -10.0)), live((4, 7.0)))
ADVANTAGE = {4: (1.5, -2.5), 5: (0.75,)}
GROUP = [8, 8, 9, 9]


def advantages(
    actor: ActorConfig, trajectories, group, turn_advantages=None, packs=None, scores=None, siblings=None
):
    """Return the advantage of each token that carries loss, by trajectory."""
    batch = TrainBatch(
        0,
        tuple(trajectories),
        np.array(group),
        turn_advantages=turn_advantages or {},
        siblings_N=siblings,
    )
    packs = packs or [list(range(len(trajectories)))]
    micros = [assemble(batch, pack, 1) for pack in packs]
    scores = scores or (lambda micro: Scores(None, None, None, None))
    targets = find_targets(actor, None, batch, micros, [scores(micro) for micro in micros], None)
    found: dict[int, list[float]] = {}
    for micro, target in zip(micros, targets, strict=True):
        for number, value in zip(micro.trajectory_M.tolist(), target.advantage_M.tolist(), strict=True):
            found.setdefault(number, []).append(value)
    return found


@pytest.mark.parametrize("advantage", sorted(ADVANTAGES))
@pytest.mark.parametrize("packs", [[[0, 1, 2, 3, 4, 5]], [[4, 0], [5, 3, 1], [2]]])
def test_each_token_of_a_live_turn_has_the_advantage_of_its_turn_and_groups_have_their_own(advantage, packs):
    actor = ActorConfig(advantage=[RewardTerm(estimator=advantage)])
    mixed = advantages(actor, (*PROMPTS, *LIVE), [*GROUP, -1, -2], ADVANTAGE, packs)
    alone = advantages(actor, PROMPTS, GROUP)
    assert mixed[4] == [1.5] * 2 + [-2.5] * 3
    assert mixed[5] == [0.75] * 4
    for number, expected in alone.items():
        assert mixed[number] == pytest.approx(expected)


def test_a_batch_of_live_turns_alone_has_their_advantages():
    found = advantages(ActorConfig(), LIVE, [-1, -2], {0: (1.0, 2.0), 1: (3.0,)})
    assert found == {0: [1.0] * 2 + [2.0] * 3, 1: [3.0] * 4}


def test_rewards_of_turns_of_a_workflow_stay_apart_from_scores_of_users():
    actor = ActorConfig(advantage=[RewardTerm(estimator="reward")], turns=TurnsConfig(baseline="group"))
    prompts = [of_prompt(1.0, 2, 0.0, 1.0), of_prompt(0.0, 2, 1.0, 3.0)]
    mixed = advantages(actor, [*prompts, *LIVE], [8, 8, -1, -2], {2: (1.5, -2.5), 3: (0.75,)})
    alone = advantages(actor, prompts, [8, 8])
    assert {0: mixed[0], 1: mixed[1]} == alone
    assert mixed[2] == [1.5] * 2 + [-2.5] * 3


def test_a_batch_of_live_turns_alone_lacks_no_rewards_of_a_workflow():
    actor = ActorConfig(advantage=[RewardTerm(estimator="reward")], turns=TurnsConfig(baseline="group"))
    assert advantages(actor, LIVE[1:], [-1], {0: (3.0,)}) == {0: [3.0] * 4}


def test_leaving_the_reference_costs_a_live_turn_as_well(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *arguments, **more: None)
    actor = ActorConfig(
        advantage=[RewardTerm(estimator="reward")],
        kl=KLConfig(where="reward", coefficient=0.5, estimator="k1"),
    )

    def scores(micro):
        proximal_M = torch.zeros(len(micro.trajectory_M), dtype=torch.float64)
        return Scores(proximal_M, proximal_M - 2.0, None, None)

    found = advantages(actor, [PROMPTS[0], LIVE[1]], [8, -1], {1: (3.0,)}, scores=scores)
    assert found == {0: [1.0 - 0.5 * 2.0 * 3] * 3, 1: [3.0 - 0.5 * 2.0 * 4] * 4}
