"""Trajectories: what the engine said about each token arrives at the trainer unchanged."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.tokens.trajectory import (
    UNSAMPLED,
    Completion,
    Finish,
    Group,
    Prompt,
    Span,
    Trajectory,
    TrajectoryBuilder,
)


def completion(*versions: int, first_token: int = 100, finish=Finish.STOP, retractions=0) -> Completion:
    """One token of each given version."""
    n = len(versions)
    spans = tuple(Span(version, i, i + 1) for i, version in enumerate(versions))
    logprobs = tuple(-0.5 - i for i in range(n))
    return Completion(tuple(range(first_token, first_token + n)), logprobs, spans, finish, retractions)


def test_spans_give_each_token_its_version():
    spans = (Span(3, 0, 2), Span(4, 2, 3), Span(7, 3, 5))
    versions = Completion((1, 2, 3, 4, 5), (0.0,) * 5, spans, Finish.STOP).versions()
    assert versions.tolist() == [3, 3, 4, 7, 7]
    assert versions.dtype == np.int32


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=6))
def test_spans_that_tile_the_tokens_are_accepted_and_repeat_their_versions(parts):
    spans, end = [], 0
    for version, length in parts:
        spans.append(Span(version, end, end + length))
        end += length
    versions = Completion((0,) * end, (0.0,) * end, tuple(spans), Finish.LENGTH).versions()
    assert versions.tolist() == [version for version, length in parts for _ in range(length)]


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (Span(0, 0, 2),),
        (Span(0, 0, 4),),
        (Span(0, 1, 3),),
        (Span(0, 0, 1), Span(1, 2, 3)),
        (Span(0, 0, 2), Span(1, 1, 3)),
        (Span(0, 0, 0), Span(0, 0, 3)),
        (Span(0, 0, 3), Span(1, 3, 3)),
        (Span(1, 1, 3), Span(0, 0, 1)),
        (Span(0, 0, 2), Span(0, 2, 1), Span(0, 1, 3)),
    ],
)
def test_spans_that_do_not_tile_the_tokens_are_refused(spans):
    with pytest.raises(ValueError, match="do not tile 3 tokens"):
        Completion((1, 2, 3), (0.0, 0.0, 0.0), spans, Finish.STOP)


def test_every_token_needs_a_log_prob():
    with pytest.raises(ValueError, match="2 tokens but 1 log-probs"):
        Completion((1, 2), (0.0,), (Span(0, 0, 2),), Finish.STOP)


def test_a_single_turn_masks_the_prompt():
    builder = TrajectoryBuilder([7, 8, 9])
    builder.add_completion(completion(2, 3, retractions=1))
    trajectory = builder.build()
    assert trajectory.tokens_T.tolist() == [7, 8, 9, 100, 101]
    assert trajectory.loss_mask_T.tolist() == [False, False, False, True, True]
    assert trajectory.logprobs_T.tolist() == [0, 0, 0, -0.5, -1.5]
    assert trajectory.versions_T.tolist() == [UNSAMPLED, UNSAMPLED, UNSAMPLED, 2, 3]
    assert trajectory.header.trained_tokens == {2: 1, 3: 1}
    assert (trajectory.finish, trajectory.retractions, trajectory.reward) == (Finish.STOP, 1, None)


def test_context_between_turns_carries_no_loss():
    builder = TrajectoryBuilder([1])
    builder.add_completion(completion(5, 5, first_token=10, finish=Finish.STOP, retractions=2))
    builder.add_context([20, 21])
    builder.add_completion(completion(6, first_token=30, finish=Finish.LENGTH, retractions=1))
    builder.add_context([40])
    trajectory = builder.build()
    assert trajectory.tokens_T.tolist() == builder.tokens == [1, 10, 11, 20, 21, 30, 40]
    assert trajectory.loss_mask_T.astype(int).tolist() == [0, 1, 1, 0, 0, 1, 0]
    assert trajectory.versions_T.tolist() == [UNSAMPLED, 5, 5, UNSAMPLED, UNSAMPLED, 6, UNSAMPLED]
    assert trajectory.logprobs_T.tolist() == [0, -0.5, -1.5, 0, 0, -0.5, 0]
    assert trajectory.finish is Finish.LENGTH, "the last completion decides"
    assert trajectory.retractions == 3
    assert trajectory.header.trained_tokens == {5: 2, 6: 1}


def test_arrays_have_the_documented_types_and_one_length():
    builder = TrajectoryBuilder([1, 2])
    builder.add_completion(completion(0))
    trajectory = builder.build()
    arrays = (trajectory.tokens_T, trajectory.loss_mask_T, trajectory.logprobs_T, trajectory.versions_T)
    assert [array.dtype for array in arrays] == [np.int64, bool, np.float32, np.int32]
    assert {array.shape for array in arrays} == {(3,)}


def test_tokens_is_a_copy():
    builder = TrajectoryBuilder([1])
    builder.tokens.append(99)
    builder.add_completion(completion(0))
    assert builder.build().tokens_T.tolist() == [1, 100]


def test_tokens_of_versions_that_are_too_old_lose_their_loss_and_stay_sampled():
    builder = TrajectoryBuilder([1])
    builder.add_completion(completion(2, 3, 4, 3))
    header = builder.build().header
    masked = header.without(frozenset({2, 3}))
    assert (masked.trained_tokens, masked.response_length, masked.sampled_length) == ({4: 1}, 1, 4)
    assert header.trained_tokens == {2: 1, 3: 2, 4: 1}


@given(st.lists(st.tuples(st.sampled_from([UNSAMPLED, 0, 1, 2]), st.booleans()), max_size=30))
def test_the_header_says_what_the_arrays_hold(tokens):
    versions_T = np.array([version for version, _ in tokens], np.int32)
    loss_mask_T = np.array([carries for _, carries in tokens], bool) & (versions_T != UNSAMPLED)
    zeros = np.zeros(len(tokens), np.float32)
    trajectory = Trajectory(zeros.astype(np.int64), loss_mask_T, zeros, versions_T, Finish.STOP)
    assert trajectory.response_length == np.count_nonzero(loss_mask_T)
    assert trajectory.sampled_length == np.count_nonzero(versions_T != UNSAMPLED)
    assert trajectory.header.length == len(tokens)
    trained, counts = np.unique(versions_T[loss_mask_T], return_counts=True)
    assert trajectory.header.trained_tokens == dict(zip(trained.tolist(), counts.tolist(), strict=True))
    start, whole = 0, []
    for version, carries, end in trajectory.header.runs:
        assert end > start
        whole += [(version, carries)] * (end - start)
        start = end
    assert whole == list(zip(versions_T, loss_mask_T, strict=True))


def test_a_trajectory_without_loss_trains_nothing():
    nothing = Trajectory(
        np.array([1]), np.array([False]), np.zeros(1, np.float32), np.array([UNSAMPLED]), Finish.STOP
    )
    assert (nothing.response_length, nothing.header.trained_tokens) == (0, {})


@pytest.mark.parametrize("empty", [True, False])
def test_an_episode_in_which_nothing_was_sampled_cannot_be_built(empty):
    """Such a trajectory would only fail in the training loop, and end the run."""
    builder = TrajectoryBuilder([1, 2])
    if empty:
        builder.add_completion(Completion((), (), (), Finish.STOP))
    with pytest.raises(ValueError, match="2 tokens, none of them sampled"):
        builder.build()


def test_a_group_gives_the_rewards_of_its_trajectories():
    builder = TrajectoryBuilder([1])
    builder.add_completion(completion(0))
    trajectories = tuple(replace(builder.build(), reward=reward) for reward in (0.0, 0.25))
    rewards = Group(0, Prompt(0, "?"), 0, trajectories).rewards
    assert rewards.tolist() == [0.0, 0.25]
    assert rewards.dtype == np.float64


def test_plain_text_becomes_one_user_message_and_a_chat_stays():
    assert Prompt(0, "2+2").messages() == [{"role": "user", "content": "2+2"}]
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2"}]
    assert Prompt(0, chat).messages() == chat


def test_turns_are_rewarded_where_they_end():
    builder = TrajectoryBuilder([1, 2])
    builder.add_completion(completion(0, 0))
    builder.reward_turn(0.5)
    builder.add_context([3])
    builder.add_completion(completion(1))
    builder.reward_turn(-1.0)
    builder.add_completion(completion(1))
    trajectory = builder.build()
    assert trajectory.turn_rewards == ((4, 0.5), (6, -1.0))
    assert trajectory.turn_T().tolist() == [0, 0, 0, 0, 1, 1, 2]
    assert trajectory.turn_T().dtype == np.int64


def test_without_rewards_of_turns_there_is_nothing_but_what_lies_behind_the_last_one():
    builder = TrajectoryBuilder([1, 2])
    builder.add_completion(completion(0, 0))
    assert builder.build().turn_T().tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("turn_rewards", "says"),
    [
        (((3, 1.0), (3, 1.0)), "ends at token 3, but the turn before it ends at 3"),
        (((0, 1.0),), "ends at token 0"),
        (((5, 1.0),), "ends at token 5, .* has 4 tokens"),
        (((3, float("nan")),), "ends at token 3 has the reward nan"),
    ],
)
def test_turns_that_cannot_be_are_refused_before_they_reach_the_trainer(turn_rewards, says):
    builder = TrajectoryBuilder([1, 2])
    builder.add_completion(completion(0, 0))
    with pytest.raises(ValueError, match=says):
        replace(builder.build(), reward=1.0, turn_rewards=turn_rewards)
