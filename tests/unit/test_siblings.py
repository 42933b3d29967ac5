"""Several trajectories of one episode travel as one, are trained apart, and count as one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.batch.train_batch import EncodedBatch, TrainBatch
from slipstream.configs.schema import ActorConfig
from slipstream.configs.schema.advantage import RewardTerm
from slipstream.rollout.tokens.record import HEADER, decode_trajectory, encode, encode_trajectory
from slipstream.rollout.tokens.trajectory import (
    UNSAMPLED,
    Completion,
    Finish,
    Span,
    Trajectory,
    TrajectoryBuilder,
    joined,
)
from tests.unit.test_trainer_live_turns import advantages

TURNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans()), min_size=1, max_size=3)
"""Of each turn: tokens of context, sampled tokens, and whether it has a reward."""


def trajectory(turns, number: int, reward: float | None = None) -> Trajectory:
    builder = TrajectoryBuilder([number, number + 1])
    for context, sampled, is_judged in turns:
        builder.add_context([7] * context)
        logprobs = tuple(-0.5 - token for token in range(sampled))
        spans = (Span(number, 0, sampled),)
        builder.add_completion(Completion(tuple(range(sampled)), logprobs, spans, Finish.STOP))
        if is_judged:
            builder.reward_turn(float(number))
    return replace(builder.build(), reward=reward)


def same(a: Trajectory, b: Trajectory) -> bool:
    arrays = ("tokens_T", "loss_mask_T", "logprobs_T", "versions_T")
    return a.turn_rewards == b.turn_rewards and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays
    )


def encoded(episodes: list[Trajectory], group: list[int], turn_advantages=None) -> EncodedBatch:
    chunks = [encode_trajectory(episode) for episode in episodes]
    return EncodedBatch(
        0,
        tuple(HEADER.decode(encode(episode.header)) for episode in episodes),
        np.frombuffer(b"".join(chunks), np.uint8),
        tuple(map(len, chunks)),
        np.array(group),
        turn_advantages=turn_advantages or {},
    )


@given(st.lists(st.lists(TURNS, min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_rank_gets_the_trajectories_that_the_workflow_has_returned(shapes):
    episodes = [
        [trajectory(turns, 10 * place + number, 1.0) for number, turns in enumerate(siblings)]
        for place, siblings in enumerate(shapes)
    ]
    batch = encoded([joined(siblings) for siblings in episodes], list(range(len(episodes)))).decoded()
    expected = [(part, place) for place, siblings in enumerate(episodes) for part in siblings]
    assert batch.episode_N.tolist() == batch.group_N.tolist() == [place for _, place in expected]
    assert all(same(got, part) for got, (part, _) in zip(batch.trajectories, expected, strict=True))


def test_live_turns_keep_their_advantages_behind_an_episode_of_several_trajectories():
    one, other = trajectory([(0, 2, False)], 1, 1.0), trajectory([(0, 3, True)], 2, 0.0)
    batch = encoded([joined([one, other]), other], [5, -1], {1: (0.5,)}).decoded()
    assert batch.turn_advantages == {2: (0.5,)}


def test_joined_again_they_are_the_same():
    parts = [trajectory([(1, 2, True)], number) for number in range(3)]
    assert joined([joined(parts[:2]), parts[2]]).siblings == joined(parts).siblings


def test_the_reward_of_an_episode_is_the_mean_of_its_trajectories():
    parts = [trajectory([(0, 1, False)], number, reward) for number, reward in enumerate((1.0, 0.0, 0.5))]
    assert joined(parts).reward == 0.5
    assert joined([replace(part, reward=None) for part in parts]).reward is None
    with pytest.raises(ValueError, match="2 of the 3 trajectories of an episode have a reward"):
        joined([*parts[:2], replace(parts[2], reward=None)])
    with pytest.raises(ValueError, match="an episode without a trajectory"):
        joined([])


@pytest.mark.parametrize("ends", [(3,), (0, 3), (2, 2, 3), (1, 2), (1, 4)])
def test_ends_that_do_not_tile_the_tokens_are_refused(ends):
    with pytest.raises(ValueError, match="expected two or more ascending indices"):
        Trajectory(
            np.arange(3),
            np.array([False, True, True]),
            np.zeros(3, np.float32),
            np.array([UNSAMPLED, 0, 0]),
            Finish.STOP,
            siblings=ends,
        )


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reward"])
def test_an_episode_counts_once_in_its_group_however_many_trajectories_it_has(advantage):
    """Against the same group with one trajectory in each episode."""
    rewards = (1.0, 0.0, 0.25)
    single = [trajectory([(0, 2, False)], 0, reward) for reward in rewards]
    alone = advantages(ActorConfig(advantage=[RewardTerm(estimator=advantage)]), single, [3, 3, 3])
    counts = (3, 1, 2)
    several = [part for part, count in zip(single, counts, strict=True) for _ in range(count)]
    batch = TrainBatch(0, tuple(several), np.array([3] * 6), siblings_N=np.repeat(np.arange(3), counts))
    together = advantages(
        ActorConfig(advantage=[RewardTerm(estimator=advantage)]),
        batch.trajectories,
        batch.group_N,
        siblings=batch.siblings_N,
    )
    for place, episode in enumerate(batch.episode_N):
        assert together[place] == pytest.approx(alone[episode])


def test_a_record_of_several_trajectories_is_read_as_it_was_written():
    episode = joined([trajectory([(2, 2, True)], 1, 1.0), trajectory([(0, 1, False)], 2, 0.0)])
    again = decode_trajectory(encode_trajectory(episode), HEADER.decode(encode(episode.header)))
    assert again.header == episode.header and same(again, episode)
