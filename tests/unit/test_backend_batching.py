"""Packing, dealing, assembling: the invariants of the module's docstring, and a naive construction."""

import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.batching import (
    StalenessViolation,
    TrainBatch,
    assemble,
    check_staleness,
    deal,
    pack,
    schedule,
    split_minibatches,
)
from rollout.trajectory import UNSAMPLED, Finish, Trajectory


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
    )


def batch_of(*trajectories: Trajectory, version: int = 5) -> TrainBatch:
    return TrainBatch(version, trajectories, np.arange(len(trajectories)) // 2)


# ---- scheduling


@st.composite
def schedules(draw):
    minibatches, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    n = draw(st.integers(minibatches * ranks, minibatches * ranks + 30))
    lengths = np.array(draw(st.lists(st.integers(1, 120), min_size=n, max_size=n)))
    return lengths, {"minibatches": minibatches, "ranks": ranks, "budget": draw(st.integers(1, 200))}


@settings(max_examples=200, deadline=None)
@given(schedules(), st.integers(0, 2**32))
def test_every_schedule_keeps_the_invariants(case, seed):
    lengths, settings_ = case
    plan = schedule(lengths, **settings_, rng=np.random.default_rng(seed))
    assert len(plan) == settings_["minibatches"]
    used = [index for minibatch in plan for rank in minibatch for one in rank for index in one]
    assert sorted(used) == list(range(len(lengths)))
    sizes = [sum(len(one) for rank in minibatch for one in rank) for minibatch in plan]
    assert max(sizes) - min(sizes) <= 1
    for minibatch in plan:
        assert len(minibatch) == settings_["ranks"]
        assert len({len(rank) for rank in minibatch}) == 1
        packs = [one for rank in minibatch for one in rank]
        for one in packs:
            assert sum(lengths[one]) <= settings_["budget"] or len(one) == 1
        idle = packs.count([])
        assert idle < settings_["ranks"]
        assert not idle or {len(one) for one in packs} == {0, 1}


def test_the_schedule_is_the_same_on_every_rank_and_another_at_every_version():
    lengths = np.random.default_rng(0).integers(1, 50, 40)
    plans = [
        schedule(lengths, minibatches=2, ranks=2, budget=100, rng=np.random.default_rng((7, version)))
        for version in (3, 3, 4)
    ]
    assert plans[0] == plans[1] != plans[2]


def test_trajectories_that_fill_the_budget_and_do_not_divide_by_the_ranks_leave_a_rank_idle_for_a_while():
    packs = pack(np.array([100, 100, 100]), [0, 1, 2], budget=100, multiple=2)
    assert sorted(packs) == [[], [0], [1], [2]]
    assert sorted(map(len, deal(packs, np.array([100, 100, 100]), 2))) == [2, 2]


def test_packing_splits_full_packs_before_a_rank_idles():
    packs = pack(np.array([10] * 6), list(range(6)), budget=30, multiple=4)
    assert sorted(map(len, packs)) == [1, 1, 2, 2]


def test_packs_are_filled_by_the_longest_trajectory_that_fits():
    assert pack(np.array([5, 9, 4, 1]), [0, 1, 2, 3], budget=10, multiple=1) == [[1, 3], [0, 2]]


def test_fewer_trajectories_than_ranks_are_an_error():
    with pytest.raises(ValueError, match="3 trajectories cannot keep 4 data-parallel ranks busy"):
        pack(np.ones(3, int), [0, 1, 2], budget=10, multiple=4)


def test_ranks_get_packs_of_similar_size_in_alternating_order():
    lengths = np.array([8, 7, 6, 5, 4, 3, 2, 1])
    dealt = deal([[i] for i in range(8)], lengths, 2)
    assert dealt == [[[0], [3], [4], [7]], [[1], [2], [5], [6]]]
    assert [sum(lengths[i] for one in rank for i in one) for rank in dealt] == [18, 18]


@given(st.integers(1, 100), st.integers(1, 10), st.integers(0, 1000))
def test_minibatches_partition_the_batch_evenly_and_at_random(n, minibatches, seed):
    parts = split_minibatches(n, minibatches, np.random.default_rng(seed))
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


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


@settings(max_examples=150, deadline=None)
@given(batches())
def test_a_micro_batch_is_what_a_loop_over_its_tokens_gives(case):
    batch, indices, multiple = case
    advantage = np.arange(10, 10 + len(batch.trajectories), dtype=np.float32)
    share = np.arange(1, 1 + len(batch.trajectories), dtype=np.float32) / 7
    micro = assemble(batch, advantage, indices, multiple, share_N=share)

    tokens, positions, expected, ends = [], [], [], [0]
    for place, index in enumerate(indices):
        one = batch.trajectories[index]
        for t, token in enumerate(one.tokens_T):
            if one.loss_mask_T[t]:
                lag = batch.version - one.versions_T[t]
                about = (lag, advantage[index], place, share[index])
                expected.append((len(tokens) - 1, token, one.logprobs_T[t], *about))
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
    fields = (micro.index_M, micro.target_M, micro.behaviour_logp_M, micro.lag_M, micro.advantage_M)
    fields += (micro.owner_M, micro.share_M)
    assert list(zip(*(field.tolist() for field in fields), strict=True)) == [
        tuple(float(x) if isinstance(x, np.float32) else int(x) for x in row) for row in expected
    ]
    assert micro.longest == max(b - a for a, b in pairwise(ends))
    kinds = {name: getattr(micro, name).dtype for name in ("tokens_T", "index_M", "target_M", "cu_seqlens")}
    assert kinds == {"tokens_T": np.int64, "index_M": np.int64, "target_M": np.int64, "cu_seqlens": np.int32}
    assert micro.behaviour_logp_M.dtype == micro.advantage_M.dtype == micro.share_M.dtype == np.float32
    assert micro.owner_M.dtype == np.int64
    assert (micro.owner_M < micro.owners).all()
    assert (assemble(batch, advantage, indices, multiple).share_M == 1).all()


def test_the_predicting_position_is_in_the_trajectory_of_its_target():
    batch = batch_of(trajectory(1, 3), trajectory(2, 2))
    micro = assemble(batch, np.zeros(2, np.float32), [0, 1])
    assert micro.index_M.tolist() == [0, 1, 2, 5, 6]


def test_tool_output_inside_a_trajectory_carries_no_loss():
    one = trajectory(2, 6)
    one.loss_mask_T[4:6] = False
    micro = assemble(batch_of(one), np.zeros(1, np.float32), [0])
    assert micro.index_M.tolist() == [1, 2, 5, 6]


def test_a_trajectory_that_begins_with_loss_is_an_error_wherever_it_lies_in_the_pack():
    batch = batch_of(trajectory(2, 2), trajectory(0, 3))
    with pytest.raises(ValueError, match="at least one prompt token"):
        assemble(batch, np.zeros(2, np.float32), [0, 1])


# ---- staleness


@st.composite
def versioned(draw):
    parts = []
    for i in range(draw(st.integers(1, 4))):
        one = trajectory(2, draw(st.integers(1, 6)), seed=i)
        one.versions_T[2:] = draw(
            st.lists(st.integers(-1, 9), min_size=len(one.versions_T) - 2, max_size=9 + 9)
        )[: len(one.versions_T) - 2]
        one.loss_mask_T[2:] = [draw(st.booleans()) for _ in one.loss_mask_T[2:]]
        parts.append(one)
    return batch_of(*parts, version=draw(st.integers(0, 9))), draw(st.integers(0, 4))


@settings(max_examples=200, deadline=None)
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


def test_a_trajectory_of_lengths_that_repeat_is_not_confused_with_its_twin():
    lengths = np.array([3, 3, 3, 3])
    packs = pack(lengths, [3, 1, 2, 0], budget=6, multiple=1)
    assert Counter(index for one in packs for index in one) == Counter(range(4))
