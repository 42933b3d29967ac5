"""Splits and pieces: the content of a shard; exactly one shard holds each element of an HF tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bridge.model.layout import Shard, UnevenSplit
from slipstream.bridge.model.mapping import (
    Columns,
    RowRun,
    Rows,
    Runs,
    Split,
    Transposed,
    Vocabulary,
    Whole,
    copy_in,
)
from tests.bridge_cases import same_bits
from tests.tries import tries


def shards_of(split: Split, sources: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    shards: list[torch.Tensor] = []
    for rank in range(size):
        shard = torch.full(split.shard_shape(size), -1, dtype=sources[0].dtype)
        copy_in(shard, sources, split.pieces(Shard(rank, size)))
        shards.append(shard)
    return shards


def numbered(*starts: int, rows: int) -> list[torch.Tensor]:
    return [torch.arange(start, start + rows)[:, None] for start in starts]


def test_query_key_and_value_are_interleaved_by_key_value_head():
    query, key, value = torch.arange(4)[:, None], *numbered(10, 20, rows=2)
    halves = shards_of(Rows((4, 2, 2), 1, units=2), [query, key, value], 2)
    assert [half.flatten().tolist() for half in halves] == [[0, 1, 10, 20], [2, 3, 11, 21]]
    [whole] = shards_of(Rows((4, 2, 2), 1, units=2), [query, key, value], 1)
    assert whole.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_every_rank_holds_its_gate_rows_and_then_its_up_rows():
    halves = shards_of(Rows((4, 4), 1), numbered(0, 10, rows=4), 2)
    assert [half.flatten().tolist() for half in halves] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_a_bias_is_split_as_its_weight_is():
    halves = shards_of(
        Rows((4, 2, 2), None, units=2), [torch.arange(4), torch.tensor([10, 11]), torch.tensor([20, 21])], 2
    )
    assert [half.tolist() for half in halves] == [[0, 1, 10, 20], [2, 3, 11, 21]]


def test_columns_go_to_ranks_and_rows_to_all():
    halves = shards_of(Columns(2, 4), [torch.arange(8).view(2, 4)], 2)
    assert [half.tolist() for half in halves] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_padding_rows_of_the_vocabulary_are_zero_even_in_a_shard_of_padding():
    shards = shards_of(Vocabulary(5, 3), [torch.ones(5, 3)], 4)
    assert [shard.sum(1).tolist() for shard in shards] == [[3, 3], [3, 3], [3, 0], [0, 0]]


def test_queries_and_gates_that_hf_interleaves_by_head_are_apart_in_each_group():
    """Two groups of two heads: HF has q0 g0 q1 g1 for a group, Megatron q0 q1 g0 g1 k v."""
    query, key, value = torch.arange(8)[:, None], *numbered(10, 20, rows=2)
    runs = [RowRun(0, first, 1, stride=4) for first in (0, 2, 1, 3)]
    split = Runs(
        ((8, 1), (2, 1), (2, 1)),
        2,
        (*runs, RowRun(1, 0, 1, 1), RowRun(2, 0, 1, 1)),
        by_unit=True,
        label="groups",
    )
    halves = shards_of(split, [query, key, value], 2)
    assert [half.flatten().tolist() for half in halves] == [[0, 2, 1, 3, 10, 20], [4, 6, 5, 7, 11, 21]]
    [whole] = shards_of(split, [query, key, value], 1)
    assert whole.flatten().tolist() == [0, 2, 1, 3, 10, 20, 4, 6, 5, 7, 11, 21]


def test_every_rank_of_linear_attention_holds_all_its_queries_and_then_all_its_keys():
    """Two heads with a query row, two key rows: interleaved by head in HF, or one block after the other."""
    interleaved = Runs(((6, 1),), 2, (RowRun(0, 0, 1, 3), RowRun(0, 1, 2, 3)), by_unit=False, label="heads")
    blocks = Runs(((6, 1),), 2, (RowRun(0, 0, 1, 1), RowRun(0, 2, 2, 2)), by_unit=False, label="heads")
    rows = [torch.arange(6)[:, None]]
    assert [shard.flatten().tolist() for shard in shards_of(interleaved, rows, 1)] == [[0, 3, 1, 2, 4, 5]]
    assert [shard.flatten().tolist() for shard in shards_of(interleaved, rows, 2)] == [[0, 1, 2], [3, 4, 5]]
    assert [shard.flatten().tolist() for shard in shards_of(blocks, rows, 1)] == [[0, 1, 2, 3, 4, 5]]
    assert [shard.flatten().tolist() for shard in shards_of(blocks, rows, 2)] == [[0, 2, 3], [1, 4, 5]]


def test_alternating_rows_of_gate_and_up_are_parted():
    runs = Runs(
        ((8, 1),), 4, (RowRun(0, 0, 1, stride=2), RowRun(0, 1, 1, stride=2)), by_unit=False, label="rows"
    )
    halves = shards_of(runs, [torch.arange(8)[:, None]], 2)
    assert [half.flatten().tolist() for half in halves] == [[0, 2, 1, 3], [4, 6, 5, 7]]


def test_a_transposed_matrix_is_split_as_megatron_has_it():
    halves = shards_of(Transposed(Columns(2, 4)), [torch.arange(8).view(4, 2)], 2)
    assert [half.tolist() for half in halves] == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    halves = shards_of(Transposed(Rows((4,), 2)), [torch.arange(8).view(2, 4)], 2)
    assert [half.tolist() for half in halves] == [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]


@st.composite
def composed(draw, units: int, columns: tuple[int, ...]) -> Runs:
    """Return a split whose runs hold every row of two HF tensors, in any order: one is interleaved by unit,
    the other consists of blocks."""
    sizes = [draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)) for _ in range(2)]
    runs = []
    for hf, rows in enumerate(sizes):
        for number, size in enumerate(rows):
            before = sum(rows[:number])
            runs.append(
                RowRun(hf, before, size, sum(rows)) if hf == 0 else RowRun(hf, units * before, size, size)
            )
    shapes = tuple((units * sum(rows), *columns) for rows in sizes)
    return Runs(shapes, units, tuple(draw(st.permutations(runs))), by_unit=draw(st.booleans()), label="units")


@st.composite
def splits(draw) -> tuple[Split, int]:
    size = draw(st.sampled_from([1, 2, 4]))
    n, m = size * draw(st.integers(1, 6)), draw(st.integers(1, 6))
    units = draw(st.integers(1, 3)) * size
    rows = tuple(units * draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 3))))
    return draw(
        st.sampled_from(
            [
                Whole((n, m)),
                Whole((m,)),
                Rows(rows, m, units),
                Rows(rows, None, units),
                Rows(tuple(size * r for r in rows), m),
                Vocabulary(draw(st.integers(1, 30)), m),
                Columns(m, n),
                draw(composed(units, (m,))),
                draw(composed(units, (1, m))),
                Transposed(Columns(m, n)),
                Transposed(Rows(rows, m, units)),
                Transposed(draw(composed(units, (m,)))),
            ]
        )
    ), size


@tries(67)
@given(splits(), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**31))
def test_shards_hold_every_element_exactly_once_and_return_it_bit_for_bit(case, dtype, seed):
    split, size = case
    generator = torch.Generator().manual_seed(seed)
    sources = [torch.randn(shape, generator=generator).to(dtype) for shape in split.hf_shapes]
    shards = shards_of(split, sources, size)
    assert {tuple(shard.shape) for shard in shards} == {split.shard_shape(size)}
    back = [torch.full_like(source, torch.nan) for source in sources]
    times = [torch.zeros(source.shape) for source in sources]
    for rank, shard in enumerate(shards[:1] if isinstance(split, Whole) else shards):
        for piece in split.pieces(Shard(rank, size)):
            piece.in_hf(back[piece.hf]).copy_(piece.in_shard(shard))
            piece.in_hf(times[piece.hf]).add_(1)
    assert all((time == 1).all() for time in times)
    assert all(same_bits(*pair) for pair in zip(back, sources, strict=True))


@pytest.mark.parametrize("size", [3, 4])
def test_an_uneven_split_is_refused_with_what_cannot_be_split(size):
    with pytest.raises(UnevenSplit, match=f"2 key-value heads.*{size} tensor-parallel ranks"):
        Rows((4, 2, 2), 1, 2, "key-value heads").pieces(Shard(0, size))
