"""Assembling, against a naive construction; the bound on staleness."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.backend.batch.micro_batch import assemble
from slipstream.backend.batch.train_batch import StalenessViolation, TrainBatch, check_staleness
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory
from tests.tries import tries


def trajectory(prompt: int, response: int, *, version: int = 0, seed: int = 0) -> Trajectory:
    rng = np.random.default_rng(seed)
    n = prompt + response
    sampled = np.arange(n) >= prompt
    return Trajectory(
        rng.integers(0, 1000, n),
        sampled,
        np.where(sampled, rng.normal(size=n), 0).astype(np.float32),
        np.where(sampled, version, UNSAMPLED).astype(np.int32),
        Finish.STOP,
        reward=1.0,
        turn_rewards=tuple((end, 1.0) for end in range(1 + seed, n, 2)) if seed else (),
    )


def batch_of(*trajectories: Trajectory, version: int = 5) -> TrainBatch:
    return TrainBatch(version, trajectories, np.arange(len(trajectories)) // 2)


# ---- assembling


@st.composite
def batches(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=6))
    parts = [
        trajectory(prompt, response, version=draw(st.integers(0, 5)), seed=i)
        for i, (prompt, response) in enumerate(shapes)
    ]
    indices = draw(st.permutations(range(len(parts))))[: draw(st.integers(0, len(parts)))]
    return batch_of(*parts), list(indices), draw(st.sampled_from([1, 2, 4, 8]))


@tries(50)
@given(batches())
def test_a_micro_batch_is_what_a_loop_over_its_tokens_gives(case):
    batch, indices, multiple = case
    share = np.arange(1, 1 + len(batch.trajectories), dtype=np.float32) / 7
    micro = assemble(batch, indices, multiple, share_N=share)

    tokens, positions, expected, ends = [], [], [], [0]
    for place, index in enumerate(indices):
        member = batch.trajectories[index]
        for t, token in enumerate(member.tokens_T):
            if member.loss_mask_T[t]:
                lag = batch.version - member.versions_T[t]
                turn = sum(end <= t for end, _ in member.turn_rewards)
                about = (lag, place, index, turn, share[index])
                expected.append((len(tokens) - 1, token, member.logprobs_T[t], *about))
            tokens.append(token)
            positions.append(t)
        ends.append(len(tokens))
    if len(tokens) % multiple or not indices:
        padding = multiple - len(tokens) % multiple
        tokens += [0] * padding
        positions += range(padding)
        ends.append(len(tokens))

    assert micro.tokens_T.tolist() == tokens
    assert micro.position_T.tolist() == positions
    assert micro.cu_seqlens.tolist() == ends
    fields = (micro.index_M, micro.target_M, micro.behaviour_logp_M, micro.lag_M)
    fields += (micro.owner_M, micro.trajectory_M, micro.turn_M, micro.share_M)
    assert list(zip(*(field.tolist() for field in fields), strict=True)) == [
        tuple(float(x) if isinstance(x, np.float32) else int(x) for x in row) for row in expected
    ]
    assert micro.longest == max(b - a for a, b in pairwise(ends))
    kinds = {name: getattr(micro, name).dtype for name in ("tokens_T", "index_M", "target_M", "cu_seqlens")}
    assert kinds == {"tokens_T": np.int64, "index_M": np.int64, "target_M": np.int64, "cu_seqlens": np.int32}
    assert micro.behaviour_logp_M.dtype == micro.share_M.dtype == np.float32
    assert micro.owner_M.dtype == micro.trajectory_M.dtype == np.int64
    assert (micro.owner_M < micro.owners).all()
    assert (assemble(batch, indices, multiple).share_M == 1).all()


@tries(33)
@given(batches(), st.sampled_from([2, 4, 6]))
def test_padded_trajectories_have_the_same_loss_as_ones_that_are_not(case, each: int):
    batch, indices, multiple = case
    plain = assemble(batch, indices)
    micro = assemble(batch, indices, multiple * each, trajectory_multiple=each)
    lengths = np.diff(micro.cu_seqlens)
    assert (lengths % each == 0).all() and len(micro.tokens_T) % (multiple * each) == 0
    for name in ("target_M", "behaviour_logp_M", "lag_M", "trajectory_M", "owner_M", "share_M"):
        np.testing.assert_array_equal(getattr(micro, name), getattr(plain, name))
    for place, index in enumerate(indices):
        start, length = micro.cu_seqlens[place], len(batch.trajectories[index].tokens_T)
        assert 0 <= lengths[place] - length < each
        segment = slice(start, start + length)
        np.testing.assert_array_equal(micro.tokens_T[segment], batch.trajectories[index].tokens_T)
        np.testing.assert_array_equal(micro.position_T[segment], np.arange(length))
    np.testing.assert_array_equal(micro.tokens_T[micro.index_M + 1], micro.target_M)


def test_the_predicting_position_is_in_the_trajectory_of_its_target():
    batch = batch_of(trajectory(1, 3), trajectory(2, 2))
    micro = assemble(batch, [0, 1])
    assert micro.index_M.tolist() == [0, 1, 2, 5, 6]


def test_tool_output_inside_a_trajectory_carries_no_loss():
    member = trajectory(2, 6)
    member.loss_mask_T[4:6] = False
    micro = assemble(batch_of(member), [0])
    assert micro.index_M.tolist() == [1, 2, 5, 6]


def test_a_trajectory_that_begins_with_loss_is_an_error_wherever_it_lies_in_the_pack():
    batch = batch_of(trajectory(2, 2), trajectory(0, 3))
    with pytest.raises(ValueError, match="at least one prompt token"):
        assemble(batch, [0, 1])


# ---- staleness


@st.composite
def versioned(draw):
    parts = []
    for i in range(draw(st.integers(1, 4))):
        member = trajectory(2, draw(st.integers(1, 6)), seed=i)
        member.versions_T[2:] = draw(
            st.lists(st.integers(-1, 9), min_size=len(member.versions_T) - 2, max_size=9 + 9)
        )[: len(member.versions_T) - 2]
        member.loss_mask_T[2:] = [draw(st.booleans()) for _ in member.loss_mask_T[2:]]
        parts.append(member)
    return batch_of(*parts, version=draw(st.integers(0, 9))), draw(st.integers(0, 4))


@tries(67)
@given(versioned())
@example((batch_of(trajectory(2, 1, version=-1), version=0), 1))  # of no version, though its lag is 1
def test_the_staleness_check_passes_exactly_when_every_trained_token_is_within_the_bound(case):
    batch, max_lag = case
    versions = [
        v
        for t in batch.trajectories
        for v, trained in zip(t.versions_T, t.loss_mask_T, strict=True)
        if trained
    ]
    if all(v >= 0 and 0 <= batch.version - v <= max_lag for v in versions):
        check_staleness(batch, max_lag)
    else:
        with pytest.raises(StalenessViolation):
            check_staleness(batch, max_lag)


def test_a_staleness_violation_says_which_trajectory_which_lags_and_which_bound():
    old = trajectory(2, 4)
    old.versions_T[2:] = [1, 1, 2, 5]
    batch = TrainBatch(5, (trajectory(2, 2, version=5), old), np.array([30, 31]))
    message = (
        "trajectory 1 of group 31 holds tokens of lag 0..4 at version 5; "
        "rollout.max_head_offpolicyness allows 0..3"
    )
    with pytest.raises(StalenessViolation, match=re.escape(message)):
        check_staleness(batch, 3)
    check_staleness(batch, 4)


def test_a_token_of_a_future_version_is_a_violation():
    with pytest.raises(StalenessViolation, match=r"lag -1\.\.-1"):
        check_staleness(batch_of(trajectory(1, 1, version=6)), 4)


def test_a_trained_token_that_no_version_sampled_is_a_violation_even_at_version_0():
    batch = TrainBatch(0, (trajectory(1, 2, version=UNSAMPLED),), np.array([8]))
    with pytest.raises(
        StalenessViolation, match="trajectory 0 of group 8 trains tokens that no policy version"
    ):
        check_staleness(batch, 4)
