"""Experts of tokens, on their way from an engine's reply to the trainer's micro-batch."""

import asyncio
import base64
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.batch.context_parallel import places_of_rank, share_of
from slipstream.backend.batch.micro_batch import assemble
from slipstream.backend.batch.train_batch import TrainBatch, unrouted
from slipstream.backend.simulate import clock
from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.collection.collector.outbox import Outbox
from slipstream.rollout.collection.collector.recording import Recording
from slipstream.rollout.engine.completion import Aborted, CompletionStream
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.tokens.record import (
    CorruptRecord,
    check_routes,
    cut_chunks,
    decode_trajectory,
    encode_chunk,
    encode_routes,
    encode_trajectory,
)
from slipstream.rollout.tokens.routes import NO_ROUTE, Routes
from slipstream.rollout.tokens.trajectory import (
    UNSAMPLED,
    Completion,
    Finish,
    Span,
    Trajectory,
    TrajectoryBuilder,
    joined,
)
from tests.tries import tries
from tests.unit.collecting import HoldingDriver, PureEngines
from tests.unit.test_engine_completion import ABORT, attested, chunk

LAYERS, TOP_K = 3, 2
WIDTH = LAYERS * TOP_K
STOP = {"type": "stop", "matched": 2}


def experts_of(places: range, ids: int = 200) -> np.ndarray:
    """Experts [R, W] that tell the places of their tokens: two different ones of each layer."""
    return np.array([[(7 * place + column) % ids for column in range(WIDTH)] for place in places], np.int32)


def reply(places: range, ids: int = 200) -> str:
    return base64.b64encode(experts_of(places, ids).astype("<i4").tobytes()).decode()


# ---- from the engine


def test_the_last_chunk_tells_the_experts_of_all_tokens_but_the_last():
    completion = GrowingCompletion()
    completion.routes_from = 2
    stream = CompletionStream(completion, 0, 1000)
    stream.add(chunk(2, 2, 0))
    meta = {"prompt_tokens": 5, "weight_versions": attested((0, 0, 3)), "routed_experts": reply(range(2, 7))}
    assert stream.add(chunk(3, 1, 0, STOP, **meta))
    routes = completion.completion().routes
    assert routes is not None and (routes.request, routes.start, routes.end) == (5, 2, 7)
    assert routes.ids_RW.dtype == np.uint8
    np.testing.assert_array_equal(routes.ids_RW, experts_of(range(2, 7)))


def test_an_aborted_completion_keeps_the_experts_of_its_tokens_and_asks_for_those_that_follow():
    completion = GrowingCompletion()
    completion.routes_from = 0
    meta = {"weight_versions": attested((0, 0, 3)), "routed_experts": reply(range(7), 300)}
    with pytest.raises(Aborted):
        CompletionStream(completion, 0, 1000).add(chunk(3, 3, 0, ABORT, prompt_tokens=5, **meta))
    assert (len(completion.tokens), completion.routes_wanted) == (2, 7)
    meta = {"weight_versions": attested((0, 0, 1)), "routed_experts": reply(range(7, 7), 300)}
    CompletionStream(completion, 0, 1000).add(chunk(1, 1, 0, STOP, prompt_tokens=7, **meta))
    assert completion.routes is not None and completion.routes.end == 7
    completion.cut(1)
    assert completion.routes.end == 6


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (reply(range(6)), "36 experts of 7 tokens"),
        (reply(range(2)), "12 experts of 7 tokens"),
        ("?", "base64"),
        (base64.b64encode(np.full(42, -1, "<i4").tobytes()).decode(), "experts -1 to 0"),
    ],
)
def test_experts_that_do_not_fit_the_tokens_are_malformed(given: str, says: str):
    completion = GrowingCompletion()
    completion.routes_from = 0
    meta = {"prompt_tokens": 5, "weight_versions": attested((0, 0, 3)), "routed_experts": given}
    with pytest.raises(ValueError, match=says):
        CompletionStream(completion, 0, 1000).add(chunk(3, 3, 0, STOP, **meta))
    assert not completion.tokens and completion.routes is None


def test_experts_that_nobody_wants_are_not_kept():
    completion = GrowingCompletion()
    meta = {"prompt_tokens": 5, "weight_versions": attested((0, 0, 3)), "routed_experts": reply(range(7))}
    CompletionStream(completion, 0, 1000).add(chunk(3, 3, 0, STOP, **meta))
    assert completion.completion().routes is None


# ---- in a trajectory


def completion(n: int, request: int, start: int) -> Completion:
    routes = Routes(request, start, experts_of(range(start, request + n - 1)).astype(np.uint8))
    return Completion((9,) * n, (-1.0,) * n, (Span(0, 0, n),), Finish.STOP, routes=routes)


def two_turns() -> Trajectory:
    """6 tokens of a prompt, 3 sampled, 2 of context, 4 sampled."""
    builder = TrajectoryBuilder([1] * 6)
    builder.add_completion(completion(3, 6, 0))
    builder.add_context([2, 2])
    builder.add_completion(completion(4, 11, 8))
    return builder.build()


def test_a_turn_brings_the_experts_of_the_last_token_before_it():
    routes_TW = two_turns().routes_TW
    assert routes_TW is not None
    np.testing.assert_array_equal(routes_TW[:-1], experts_of(range(14)))
    assert (routes_TW[-1] == NO_ROUTE).all()


def test_experts_of_a_request_that_is_not_the_episode_so_far_are_left_out():
    builder = TrajectoryBuilder([1] * 3)
    builder.add_completion(completion(3, 6, 0))
    routes_TW = builder.build().routes_TW
    assert routes_TW is not None
    np.testing.assert_array_equal(routes_TW[2:5], experts_of(range(5, 8)))
    assert (routes_TW[[0, 1, 5]] == NO_ROUTE).all()


@given(st.lists(st.booleans(), min_size=15, max_size=15), st.sampled_from([200, 300]), st.integers(0, 15))
def test_experts_come_back_from_the_record_one_byte_each_up_to_256(known, ids, routed):
    trajectory, is_known_T = two_turns(), np.array(known)
    routes_TW = np.where(is_known_T[:, None], experts_of(range(60, 75), ids), NO_ROUTE).astype(np.uint16)
    trajectory = replace(trajectory, routes_TW=routes_TW)
    plain = encode_trajectory(replace(trajectory, routes_TW=None))
    encoded = encode_trajectory(trajectory)
    parts = np.count_nonzero(np.diff(np.append(0, is_known_T)) == 1)
    size = 1 if ids <= 256 else 2
    assert len(encoded) - len(plain) <= parts * 16 + is_known_T.sum() * WIDTH * size
    check_routes(encoded)
    read = decode_trajectory(encoded, trajectory.header).routes_TW
    assert (read is None) == (not is_known_T.any())
    if read is not None:
        np.testing.assert_array_equal(read, routes_TW)
    assert cut_chunks(encoded, [9, 6]) == plain
    rest = decode_trajectory(encode_trajectory(trajectory, 0, routed), trajectory.header).routes_TW
    if rest is not None:
        np.testing.assert_array_equal(rest[routed:], routes_TW[routed:])
        assert (rest[:routed] == NO_ROUTE).all()


def test_joined_trajectories_keep_their_experts_and_get_them_back():
    plain, routed = replace(two_turns(), routes_TW=None), two_turns()
    first, second = joined([plain, routed]).split()
    assert first.routes_TW is not None and (first.routes_TW == NO_ROUTE).all()
    np.testing.assert_array_equal(second.routes_TW, routed.routes_TW)
    assert joined([plain, plain]).routes_TW is None


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([(5, 2, 6), (3, 2, 6)], None),
        ([(5, 2, 6), (4, 2, 6)], "each token once"),
        ([(6, 2, 6)], "each token once"),
        ([(5, 2, 6), (3, 2, 4)], "one number for all"),
        ([(1, 2, 6)], "routes of 2 tokens, 1 tokens back"),
    ],
)
def test_the_audit_wants_experts_that_tile_the_tokens(parts, says):
    data = encode_chunk([1, 2], [3, 4, 5], [-1, -1, -1])
    for back, rows, width in parts:
        data += encode_routes(back, np.zeros((rows, width), np.uint8))
    if says is None:
        return check_routes(data)
    with pytest.raises(CorruptRecord, match=says):
        check_routes(data)


# ---- in the record


class RoutedEngines(PureEngines):
    """Tells the experts of each place, as far as they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int | None] = []

    async def generate(self, input_ids, sampling, completion, *, greedy=False, grown=None) -> None:
        self.asked.append(completion.routes_wanted)
        await super().generate(input_ids, sampling, completion, greedy=greedy, grown=grown)
        if completion.routes_wanted is not None:
            places = range(completion.routes_wanted, len(input_ids) + len(completion.tokens) - 1)
            completion.add_routes(len(input_ids), experts_of(places).astype(np.uint8))


SAMPLING = SamplingConfig(max_new_tokens=6)


async def three_turns(generator, turns: int = 3) -> Trajectory:
    builder = TrajectoryBuilder([101, 102, 103])
    for turn in range(turns):
        builder.add_context([200 + turn])
        builder.add_completion(await generator.generate(builder.tokens, SAMPLING))
    return builder.build()


def lives(stops: list[int], *, wants_routes: bool = True) -> tuple[HoldingDriver, Trajectory, list[list]]:
    """Run an episode; its process is killed after each number of turns in ``stops``."""
    driver, asked = HoldingDriver(), []

    async def main() -> Trajectory:
        for life, turns in enumerate([*stops, 3]):
            engines, outbox = RoutedEngines(), Outbox()
            asked.append(engines.asked)
            clock_s = asyncio.get_running_loop().time
            record = Recording(engines, outbox, 5, life, 0, clock=clock_s, wants_routes=wants_routes)
            if life:
                record.resume(*driver.samples[5, 0].prior())
            async with driver.hearing(outbox):
                trajectory = await three_turns(record, turns)
                record.write_ends()
                if turns == 3:
                    record.answered(trajectory)
        return trajectory

    return driver, clock.run(main()), asked


@pytest.mark.parametrize("stops", [[], [1], [2], [1, 2]])
def test_the_record_holds_the_experts_of_each_token_once_however_often_the_process_ends(stops):
    driver, trajectory, asked = lives(stops)
    held = driver.samples[5, 0].trajectory()
    for routes_TW in (trajectory.routes_TW, held.routes_TW):
        np.testing.assert_array_equal(routes_TW[:-1], experts_of(range(len(held.tokens_T) - 1)))
        assert (routes_TW[-1] == NO_ROUTE).all()
    starts = [start for life in asked for start in life]
    assert starts[0] == 0 and all(a < b for a, b in pairwise(starts)), "nothing is asked for twice"
    _, plain, _ = lives(stops, wants_routes=False)
    assert plain.routes_TW is None


def test_a_run_without_replay_asks_for_nothing_and_records_the_same_bytes():
    plain, _, asked = lives([], wants_routes=False)
    routed, trajectory, _ = lives([])
    assert set(asked[0]) == {None}
    tokens = len(trajectory.tokens_T) - 1
    assert plain.payload < routed.payload <= plain.payload + 3 * 16 + tokens * WIDTH


# ---- to the trainer


def batch_of(*trajectories: Trajectory) -> TrainBatch:
    return TrainBatch(0, trajectories, np.zeros(len(trajectories), np.int64))


def test_a_micro_batch_and_its_shares_hold_the_experts_of_their_tokens():
    plain = replace(two_turns(), routes_TW=None)
    micro = assemble(batch_of(two_turns(), plain), [1, 0], 8, trajectory_multiple=4)
    assert micro.routes_TW is not None and len(micro.routes_TW) == len(micro.tokens_T) == 32
    np.testing.assert_array_equal(micro.routes_TW[16:30], experts_of(range(14)))
    assert (micro.routes_TW[:16] == NO_ROUTE).all() and (micro.routes_TW[30:] == NO_ROUTE).all()
    for rank in range(2):
        places = places_of_rank(micro.cu_seqlens, 2, rank)
        np.testing.assert_array_equal(share_of(micro, 2, rank).routes_tW, micro.routes_TW[places])
    assert assemble(batch_of(plain), [0]).routes_TW is None


def test_a_micro_batch_holds_the_experts_of_tokens_that_are_taken_once():
    routed = two_turns()
    assert routed.routes_TW is not None
    micro = assemble(batch_of(routed, routed), [0, 1], 8, taken_N=np.array([0, 3]))
    assert micro.routes_TW is not None and len(micro.routes_TW) == len(micro.tokens_T)
    own_TW = np.concatenate([routed.routes_TW, routed.routes_TW[3:]])
    assert (micro.routes_TW[: len(own_TW)] == own_TW).all()
    assert (micro.routes_TW[len(own_TW) :] == NO_ROUTE).all()


def test_tokens_without_experts_are_counted():
    routed, plain = two_turns(), replace(two_turns(), routes_TW=None)
    experts = [True] * LAYERS, TOP_K, 256
    assert unrouted(batch_of(routed), *experts) == 0
    assert unrouted(batch_of(routed, plain), *experts) == 0.5
    assert unrouted(batch_of(plain), *experts) == 1


@pytest.mark.parametrize(
    ("layers", "top_k", "experts", "says"),
    [
        ([True] * 2, 2, 256, "routes of 6 choices.*expected 2 layers \\* 2 choices"),
        ([True] * 3, 2, 10, "expected 3 layers \\* 2 choices among 10 experts"),
    ],
)
def test_experts_of_another_model_are_refused(layers, top_k, experts, says):
    with pytest.raises(ValueError, match=says):
        unrouted(batch_of(two_turns()), layers, top_k, experts)


def test_an_engine_that_does_not_tell_the_experts_of_a_layer_is_named():
    trajectory = two_turns()
    trajectory.routes_TW[:-1, 2:4] = 0
    with pytest.raises(ValueError, match="the engine does not tell its routes"):
        unrouted(batch_of(trajectory), [True] * 3, 2, 256)
    assert unrouted(batch_of(trajectory), [True, False, True], 2, 256) == 0


@st.composite
def holed(draw):
    """Trajectories of 2 to 20 tokens, any of which may lack its experts; tokens with experts at random."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        known = draw(st.lists(st.booleans(), min_size=1, max_size=19))
        tokens, ids = len(known) + 1, np.full((len(known) + 1, WIDTH), NO_ROUTE, np.uint16)
        for place, is_there in enumerate(known):
            if is_there:
                layer = st.permutations(range(draw(st.sampled_from([2, 300]))))
                ids[place] = [expert for _ in range(LAYERS) for expert in draw(layer)[:TOP_K]]
        trained_T = np.arange(tokens) > 0
        logprobs_T, versions_T = np.zeros(tokens, np.float32), np.where(trained_T, 0, UNSAMPLED)
        made.append(
            Trajectory(
                np.arange(tokens),
                trained_T,
                logprobs_T,
                versions_T.astype(np.int32),
                Finish.STOP,
                reward=1.0,
                routes_TW=ids if draw(st.booleans()) else None,
            )
        )
    return made


@tries(20)
@given(holed(), st.sampled_from([1, 2]))
def test_experts_with_holes_reach_every_rank_as_they_are_and_each_hole_is_counted(made, size: int):
    texts = [decode_trajectory(encode_trajectory(each), each.header) for each in made]
    batch = batch_of(*texts)
    micro = assemble(batch, range(len(texts)), 2 * size, trajectory_multiple=2 * size if size > 1 else 1)
    placed: dict[tuple[int, int], tuple[int, ...]] = {}
    holes = total = 0
    for number, each in enumerate(made):
        for place in range(len(each.tokens_T)):
            row = [NO_ROUTE] * WIDTH if each.routes_TW is None else each.routes_TW[place].tolist()
            placed[number, place] = tuple(row)
            is_last = place == len(each.tokens_T) - 1
            total, holes = total + (not is_last), holes + (not is_last and NO_ROUTE in row)
    assert unrouted(batch, [True] * LAYERS, TOP_K, 300) == pytest.approx(holes / total)
    if all(set(row) == {NO_ROUTE} for row in placed.values()):
        return
    for rank in range(size):
        places = places_of_rank(micro.cu_seqlens, size, rank) if size > 1 else range(len(micro.tokens_T))
        routes_tW = share_of(micro, size, rank).routes_tW
        assert routes_tW is not None
        for row, place in zip(routes_tW.tolist(), places, strict=True):
            number = int(np.searchsorted(micro.cu_seqlens, place, side="right")) - 1
            within = int(place - micro.cu_seqlens[number])
            assert tuple(row) == placed.get((number, within), (NO_ROUTE,) * WIDTH)
