"""How context-parallel ranks share a micro-batch: exhaustively for small packs, and against a loop."""

import itertools

import numpy as np
import pytest
from hypothesis import given

from slipstream.backend.batch.context_parallel import places_of_rank, share_of
from slipstream.backend.batch.micro_batch import assemble
from tests.tries import tries
from tests.unit.test_batch_micro_batch import batches


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_place_is_on_exactly_one_rank_and_all_ranks_have_equally_many(size: int):
    for count in range(4):
        for chunks in itertools.product(range(4), repeat=count):
            cu_seqlens = np.cumsum([0, *(2 * size * chunk for chunk in chunks)])
            ranks = [places_of_rank(cu_seqlens, size, rank) for rank in range(size)]
            assert sorted(np.concatenate(ranks).tolist()) == list(range(cu_seqlens[-1]))
            assert {len(places) for places in ranks} == {cu_seqlens[-1] // size}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_causal_attention_costs_every_rank_the_same(size: int):
    for length in (2 * size, 10 * size):
        cost = [int((places_of_rank(np.array([0, length]), size, r) + 1).sum()) for r in range(size)]
        assert len(set(cost)) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_has_its_two_chunks_of_every_sequence_the_earlier_one_first(size: int):
    lengths, expected = [2 * size, 6 * size, 4 * size], [[] for _ in range(size)]
    start = 0
    for length in lengths:
        pieces = np.array_split(np.arange(start, start + length), 2 * size)
        for rank in range(size):
            expected[rank] += [*pieces[rank], *pieces[-1 - rank]]
        start += length
    cu_seqlens = np.cumsum([0, *lengths])
    assert [places_of_rank(cu_seqlens, size, rank).tolist() for rank in range(size)] == expected


def test_a_sequence_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="6 tokens cannot be cut into 4 chunks"):
        places_of_rank(np.array([0, 4, 10]), 2, 0)


@pytest.mark.parametrize("size", [1, 2, 3])
@tries(20)
@given(batches())
def test_a_token_with_loss_is_predicted_on_the_rank_that_holds_its_place(size: int, case):
    batch, indices, tensor = case
    each = 2 * size
    micro = assemble(batch, indices, each * tensor, trajectory_multiple=each)
    shares = [share_of(micro, size, rank) for rank in range(size)]
    predicted = {}
    for rank, share in enumerate(shares):
        places = places_of_rank(micro.cu_seqlens, size, rank) if size > 1 else np.arange(len(micro.tokens_T))
        assert len(share.tokens_t) % tensor == 0
        np.testing.assert_array_equal(share.tokens_t, micro.tokens_T[places])
        np.testing.assert_array_equal(share.position_t, micro.position_T[places])
        for index, target in zip(share.index_m, share.target_m, strict=True):
            assert micro.tokens_T[places[index] + 1] == target
            predicted[int(places[index])] = target
    assert predicted == dict(zip(micro.index_M.tolist(), micro.target_M, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
@tries(20)
@given(batches())
def test_what_the_ranks_have_comes_together_in_the_order_of_the_micro_batch(size: int, case):
    batch, indices, _ = case
    micro = assemble(batch, indices, 2 * size, trajectory_multiple=2 * size)
    shares = [share_of(micro, size, rank) for rank in range(size)]
    together = np.concatenate([share.target_m for share in shares])
    for share in shares:
        assert share.counts == tuple(len(other.target_m) for other in shares)
        np.testing.assert_array_equal(together[share.order_M], micro.target_M)
