"""What the trainer's ranks send fills every element of every engine exactly once, with the right value.

The oracle cuts rectangles out of whole HF tensors; it uses none of the code that makes plans.
"""

from collections import defaultdict
from itertools import pairwise
from math import prod
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from slipstream.bridge.families import FAMILIES, spec_of
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.shards.plan import entries
from slipstream.bridge.shards.regions import Move, Region, contiguous, joined, meet, messages
from slipstream.bridge.shards.sends import EngineSeat, Sends, indexed
from tests.bridge_cases import LAYOUTS, hf_configs, same_bits, trained_tensors, trainer_shards
from tests.tries import tries


@st.composite
def engine_tables(draw, tensors: dict[str, torch.Tensor], ranks: int) -> list[list[Region]]:
    """Draw where each rank of an engine has each tensor: whole, cut along a dimension, dealt out row by row,
    or transposed, with padding around it and several tensors in one parameter.
    """
    tables: list[list[Region]] = [[] for _ in range(ranks)]
    ends: list[defaultdict[str, int]] = [defaultdict(int) for _ in range(ranks)]
    for name, tensor in tensors.items():
        kind = draw(st.sampled_from(["whole", "cut", "cut", "dealt", "transposed"]))
        dim = draw(st.integers(0, tensor.dim() - 1))
        cuts = sorted(
            draw(st.lists(st.integers(0, tensor.shape[dim]), min_size=ranks - 1, max_size=ranks - 1))
        )
        bounds = list(pairwise([0, *cuts, tensor.shape[dim]]))
        dtype = str(tensor.dtype)
        parameter = f"{dtype}.{draw(st.integers(0, 2))}"
        gap = draw(st.integers(0, 3))
        for rank in range(ranks):
            own = range(tensor.shape[dim])
            if kind == "dealt":
                own = own[rank::ranks]
            elif kind != "whole":
                own = own[slice(*bounds[rank])]
            if not own:
                continue
            start = tuple(own.start if d == dim else 0 for d in range(tensor.dim()))
            size = tuple(len(own) if d == dim else n for d, n in enumerate(tensor.shape))
            steps = tuple(own.step if d == dim else 1 for d in range(tensor.dim()))
            strides = contiguous(size)
            if kind == "transposed":
                strides = tuple(reversed(contiguous(size[::-1])))
            stride = tuple(step if n > 1 else 0 for step, n in zip(strides, size, strict=True))
            offset = ends[rank][parameter] + gap
            ends[rank][parameter] = offset + prod(size)
            tables[rank].append(Region(name, start, size, parameter, offset, stride, steps))
    return tables


def expected(table: list[Region], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters of an engine rank, cut out of the HF tensors; NaN bits where nothing belongs."""
    result = empty(table, tensors)
    for region in table:
        cut = tensors[region.hf][
            tuple(
                slice(start, start + n * step, step)
                for start, n, step in zip(region.start, region.size, region.step, strict=True)
            )
        ]
        place(result[region.tensor], region.size, region.stride, region.offset).copy_(cut)
    return result


def empty(table: list[Region], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    sizes: defaultdict[str, int] = defaultdict(int)
    dtypes = {}
    for region in table:
        sizes[region.tensor] = max(sizes[region.tensor], region.offset + prod(region.size))
        dtypes[region.tensor] = tensors[region.hf].dtype
    return {name: torch.zeros(n, dtype=dtypes[name]) for name, n in sizes.items()}


def place(tensor: torch.Tensor, shape, stride, offset) -> torch.Tensor:
    return torch.as_strided(tensor, shape, stride, offset)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@tries(4)
@given(data=st.data())
def test_every_element_of_every_engine_is_sent_exactly_once(family, data):
    hf = data.draw(hf_configs(family))
    spec = spec_of(hf, Path("nowhere"))
    layout = LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))]
    if layout.expert > 1 and spec.geometry.experts is None:
        layout = Layout()
    tensors = trained_tensors(spec, torch.bfloat16, seed=data.draw(st.integers(0, 99)))
    engines = data.draw(st.integers(1, 5))
    tables = data.draw(engine_tables(tensors, data.draw(st.integers(1, 3))))
    names = [f"table-{rank}" for rank in range(len(tables))]
    by_name = {name: indexed(table) for name, table in zip(names, tables, strict=True)}
    packed, direct = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 400))

    received = [[empty(table, tensors) for table in tables] for _ in range(engines)]
    writes = [
        [{name: torch.zeros(len(t), dtype=torch.int32) for name, t in rank.items()} for rank in engine]
        for engine in received
    ]
    for rank in range(layout.world_size):
        sends = Sends(spec, layout, rank, packed=packed, direct=direct)
        shards = trainer_shards(spec, layout, rank, tensors)
        for number in range(engines):
            for to, sent in sends.to_engine(names, by_name, EngineSeat(number, engines)).items():
                for message in sent:
                    assert message.numel == sum(move.numel for move in message.moves)
                    assert message.direct or message.numel <= max(packed, 1) or len(message.moves) == 1
                    for move in message.moves:
                        source = place(
                            shards[move.source], move.shape, move.source_stride, move.source_offset
                        )
                        target = received[number][to][move.target]
                        place(target, move.shape, move.target_stride, move.target_offset).copy_(source)
                        place(
                            writes[number][to][move.target],
                            move.shape,
                            move.target_stride,
                            move.target_offset,
                        ).add_(1)
    for number in range(engines):
        for to, table in enumerate(tables):
            for name, tensor in expected(table, tensors).items():
                assert same_bits(received[number][to][name], tensor)
            covered = {name: torch.zeros(len(t), dtype=torch.int32) for name, t in writes[0][to].items()}
            for region in table:
                place(covered[region.tensor], region.size, region.stride, region.offset).add_(1)
            for name, count in writes[number][to].items():
                assert torch.equal(count, covered[name])


def run(source: int, target: int, length: int) -> Move:
    return Move("s", source, (1,), "t", target, (1,), (length,))


def test_runs_that_go_on_where_others_end_on_both_sides_are_joined():
    assert joined([run(4, 14, 6), run(0, 10, 4)]) == [run(0, 10, 10)]
    assert len(joined([run(0, 10, 4), run(5, 14, 6)])) == 2
    assert len(joined([run(0, 10, 4), run(4, 15, 6)])) == 2


def test_long_runs_travel_alone_and_short_ones_together():
    moves = [run(0, 0, 3), run(10, 10, 100), run(200, 200, 3), run(300, 300, 3)]
    sent = messages(moves, packed=50, direct=100)
    assert [(message.numel, message.direct) for message in sent] == [(3, True), (100, True), (6, False)]


@pytest.mark.parametrize(("seats", "copies"), [(1, 2), (2, 2), (5, 2), (3, 4)])
def test_copies_share_the_work(seats: int, copies: int):
    """With data parallelism no rank sends more than its fair share of the bytes, give or take a layer."""
    hf = {
        "model_type": "qwen3",
        "num_hidden_layers": 12,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 16,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }
    spec = spec_of(hf, Path("nowhere"))
    regions = []
    for entry in entries(spec, Layout()):
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            regions.append(
                Region(name, (0,) * len(shape), shape, name, 0, contiguous(shape), (1,) * len(shape))
            )
    layout, sent = Layout(data=copies), []
    for rank in range(copies):
        sends = Sends(spec, layout, rank, packed=10**6, direct=10**6)
        sent.append(
            sum(
                message.numel
                for number in range(seats)
                for own in sends.to_engine(["t"], {"t": indexed(regions)}, EngineSeat(number, seats)).values()
                for message in own
            )
        )
    whole = sum(prod(region.size) for region in regions)
    assert sum(sent) == seats * whole
    if seats < copies:
        assert max(sent) < 0.6 * seats * whole
    else:
        assert max(sent) == -(-seats // copies) * whole


@st.composite
def sequences(draw) -> tuple[range, int, int]:
    """Draw places in an HF tensor of one dimension, and offset and stride of their elements on a rank."""
    start, length, step = draw(st.integers(0, 12)), draw(st.integers(1, 12)), draw(st.integers(1, 6))
    stride = draw(st.integers(1, 5)) if length > 1 else 0
    return range(start, start + length * step, step), draw(st.integers(0, 9)), stride


@tries(100)
@given(sequences(), sequences())
def test_regions_with_gaps_meet_where_they_have_places_in_common(source, target):
    def region(places: range, offset: int, stride: int) -> Region:
        return Region("hf", (places.start,), (len(places),), "own", offset, (stride,), (places.step,))

    def offsets(places: range, offset: int, stride: int) -> dict[int, int]:
        return {place: offset + number * stride for number, place in enumerate(places)}

    of_source, of_target = offsets(*source), offsets(*target)
    common = {(of_source[place], of_target[place]) for place in of_source.keys() & of_target.keys()}
    move = meet(region(*source), region(*target))
    if move is None:
        assert not common
        return
    [length], [source_stride], [target_stride] = move.shape, move.source_stride, move.target_stride
    assert length == len(common)
    assert common == {
        (move.source_offset + number * source_stride, move.target_offset + number * target_stride)
        for number in range(length)
    }


def test_contiguous_strides_are_numpys():
    for shape in [(3,), (2, 3), (4, 1, 5), (7, 2, 3, 2)]:
        array = np.empty(shape, np.int8)
        assert contiguous(shape) == array.strides
