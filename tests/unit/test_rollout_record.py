"""The record of an episode: what was encoded comes back, and other bytes are refused by name."""

import struct
from array import array
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.tokens.record import (
    CorruptRecord,
    PieceHeader,
    checksum,
    decode_chunks,
    decode_header,
    decode_piece,
    decode_trajectory,
    digest,
    encode,
    encode_chunk,
    encode_trajectory,
)
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory, TrajectoryHeader
from tests.tries import tries

IDS = st.integers(0, 2**31 - 1)
LOGPROBS = st.floats(-200, 0, width=32)
VERSIONS = st.sampled_from([0, 1, 2, 7, 2**31 - 1])

CONTEXT = st.builds(lambda n: [(UNSAMPLED, False)] * n, st.integers(0, 4))
SAMPLED = st.builds(lambda n, v, loss: [(v, loss)] * n, st.integers(0, 4), VERSIONS, st.booleans())
"""Parts of a trajectory, (version, carries loss) for each token. Any part may be empty."""


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    parts = draw(st.lists(CONTEXT | SAMPLED, max_size=9))
    marks = [mark for part in parts for mark in part]
    versions_T = np.array([version for version, _ in marks], np.int32)
    sampled_T = versions_T != UNSAMPLED
    logprobs_T = np.array([draw(LOGPROBS) if sampled else 0 for sampled in sampled_T], np.float32)
    tokens = draw(st.lists(IDS, min_size=len(marks), max_size=len(marks)))
    turns = draw(st.lists(st.integers(1, len(marks)), unique=True, max_size=3)) if marks else []
    return Trajectory(
        np.array(tokens, np.int64),
        np.array([loss for _, loss in marks], np.bool_),
        logprobs_T,
        versions_T,
        draw(st.sampled_from(Finish)),
        draw(st.integers(0, 9)),
        draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        tuple((end, end / 3) for end in sorted(turns)),
        draw(st.sampled_from([(), (("format", 0.25), ("length", -1e9))])),
    )


def cut(trajectory: Trajectory, start: int, stop: int) -> Trajectory:
    """The tokens [start, stop) alone."""
    part = slice(start, stop)
    return replace(
        trajectory,
        tokens_T=trajectory.tokens_T[part],
        loss_mask_T=trajectory.loss_mask_T[part],
        logprobs_T=trajectory.logprobs_T[part],
        versions_T=trajectory.versions_T[part],
        turn_rewards=(),
    )


def assert_same(a: Trajectory, b: Trajectory) -> None:
    for name in ("tokens_T", "loss_mask_T", "logprobs_T", "versions_T"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype, name
        np.testing.assert_array_equal(x, y, name)
    for name in ("finish", "retractions", "reward", "turn_rewards", "reward_parts"):
        assert getattr(a, name) == getattr(b, name), name


# ---- trajectories


@given(trajectories(), st.data())
def test_a_trajectory_comes_back_from_the_chunks_before_and_behind_any_token(trajectory, data):
    """What the record holds already, and the rest that is sent at the end, make the whole trajectory."""
    start = data.draw(st.integers(0, len(trajectory.tokens_T)))
    before = encode_trajectory(cut(trajectory, 0, start))
    header = decode_header(encode(trajectory.header))
    assert header == trajectory.header
    assert_same(decode_trajectory(before + encode_trajectory(trajectory, start), header), trajectory)


@given(trajectories(), st.data())
def test_chunks_hold_every_token_once_and_log_probs_of_sampled_tokens_only(trajectory, data):
    start = data.draw(st.integers(0, len(trajectory.tokens_T)))
    chunks = list(decode_chunks(encode_trajectory(trajectory, start)))
    tokens = [token for chunk in chunks for part in (chunk.context, chunk.tokens) for token in part.tolist()]
    assert tokens == trajectory.tokens_T[start:].tolist()
    sampled_T = trajectory.versions_T != UNSAMPLED
    assert [x for chunk in chunks for x in chunk.logprobs.tolist()] == pytest.approx(
        trajectory.logprobs_T[start:][sampled_T[start:]].tolist(), abs=0
    )
    assert sum(len(chunk.context) for chunk in chunks) == np.count_nonzero(~sampled_T[start:])


@given(trajectories())
def test_the_size_of_a_record_is_linear_in_its_tokens(trajectory):
    n_sampled = int(np.count_nonzero(trajectory.versions_T != UNSAMPLED))
    size = len(encode_trajectory(trajectory))
    changes = np.count_nonzero(np.diff(trajectory.versions_T != UNSAMPLED))
    assert size <= 4 * len(trajectory.tokens_T) + 4 * n_sampled + 8 * (changes + 1)


def test_the_bytes_of_a_chunk_are_those_that_the_module_describes():
    """Ledgers of earlier runs hold them."""
    chunk = encode_chunk([7, 8], array("i", [2**31 - 1]), array("f", [-0.5]))
    assert chunk == struct.pack("<II3if", 2, 1, 7, 8, 2**31 - 1, -0.5)
    assert checksum(b"123456789") == 0xCBF43926


@given(st.lists(IDS, max_size=5), st.lists(st.tuples(IDS, LOGPROBS), max_size=5), st.integers(0, 3))
def test_a_chunk_can_be_decoded_at_any_place_in_a_buffer(context, sampled, shift):
    tokens, logprobs = [token for token, _ in sampled], [logprob for _, logprob in sampled]
    data = bytes(shift) + encode_chunk(context, tokens, logprobs)
    (chunk,) = decode_chunks(memoryview(data)[shift:])
    assert (chunk.context.tolist(), chunk.tokens.tolist()) == (context, tokens)
    assert chunk.logprobs.tolist() == logprobs


def test_no_bytes_are_the_record_of_no_token():
    nothing = Trajectory(*(np.zeros(0, kind) for kind in (np.int64, np.bool_, np.float32, np.int32)), "stop")
    assert encode_trajectory(nothing) == b""
    assert len(decode_trajectory(b"", TrajectoryHeader((), Finish.STOP)).tokens_T) == 0
    assert not list(decode_chunks(b""))


# ---- bytes that are no record

EXAMPLE = Trajectory(
    np.arange(7),
    np.array([0, 0, 1, 1, 1, 0, 1], np.bool_),
    np.array([0, 0, -1, -2, -3, 0, -4], np.float32),
    np.array([UNSAMPLED, UNSAMPLED, 3, 3, 4, UNSAMPLED, 4], np.int32),
    Finish.STOP,
    1,
    0.5,
    ((5, 1.0),),
)


def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """``data`` with some bytes overwritten, left out or added."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(out)))
        new = draw(st.binary(max_size=9))
        out[place : place + draw(st.integers(0, 9))] = new
    return bytes(out)


DAMAGED_CHUNKS = st.composite(damaged)(encode_trajectory(EXAMPLE))
DAMAGED_HEADER = st.composite(damaged)(encode(EXAMPLE.header))
PIECE = PieceHeader(3, b"d" * 16, ((4, 2), (5, 1)), Finish.STOP, 1, True)
DAMAGED_PIECE = st.composite(damaged)(encode(PIECE))


@tries(100)
@given(DAMAGED_CHUNKS | st.just(encode_trajectory(EXAMPLE)), DAMAGED_HEADER | st.binary(max_size=40))
def test_damaged_bytes_are_refused_or_read_but_raise_nothing_else(chunks, header):
    for data in (header, encode(EXAMPLE.header)):
        try:
            read = decode_trajectory(chunks, decode_header(data))
        except CorruptRecord:
            continue
        lengths = {len(x) for x in (read.tokens_T, read.loss_mask_T, read.logprobs_T, read.versions_T)}
        assert lengths == {read.header.length}
        assert not (read.loss_mask_T & (read.versions_T == UNSAMPLED)).any()


@given(DAMAGED_PIECE | st.binary(max_size=40))
def test_a_damaged_header_of_a_piece_is_refused_or_read_but_raises_nothing_else(data):
    try:
        piece = decode_piece(data)
    except CorruptRecord:
        return
    assert isinstance(piece, PieceHeader)


def test_the_header_of_a_piece_comes_back():
    assert decode_piece(encode(PIECE)) == PIECE


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        (((UNSAMPLED, False, 2), (3, True, 6)), "7 tokens, and runs"),
        (((UNSAMPLED, False, 2), (3, True, 8)), "7 tokens, and runs"),
        (((UNSAMPLED, False, 2), (3, True, 2), (4, True, 7)), "7 tokens, and runs"),
        (((UNSAMPLED, False, 9), (3, True, 7)), "7 tokens, and runs"),
        (((3, True, 2**64 - 1), (3, True, 7)), "7 tokens, and runs"),
        (((3, True, -(2**63)), (3, True, 7)), "7 tokens, and runs"),
        (((UNSAMPLED, True, 2), (3, True, 7)), "carries loss has no version"),
        (((2**40, True, 7),), "1099511627776"),
        ((), "7 tokens, and runs"),
    ],
)
def test_a_header_that_does_not_fit_the_chunks_is_refused(runs, says):
    header = decode_header(encode(TrajectoryHeader(runs, Finish.STOP)))
    with pytest.raises(CorruptRecord, match=says):
        decode_trajectory(encode_trajectory(EXAMPLE), header)


def test_turns_that_cannot_be_are_refused():
    header = msgspec.structs.replace(EXAMPLE.header, turn_rewards=((9, 1.0),))
    with pytest.raises(CorruptRecord, match="a turn ends at token 9"):
        decode_trajectory(encode_trajectory(EXAMPLE), header)


@pytest.mark.parametrize("decode", [decode_header, decode_piece])
@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x91" * 100_000 + b"\xc0", b"\x92\x90\xa1\xff"])
def test_nested_and_undecodable_bytes_are_no_header(decode, data):
    with pytest.raises(CorruptRecord):
        decode(data)


# ---- headers


@given(trajectories(), st.frozensets(VERSIONS))
def test_a_header_counts_what_the_arrays_hold(trajectory, stale):
    versions_T, loss_T = trajectory.versions_T, trajectory.loss_mask_T
    header, masked = trajectory.header, trajectory.header.without(stale)
    assert header.length == masked.length == len(versions_T)
    assert header.sampled_length == masked.sampled_length == np.count_nonzero(versions_T != UNSAMPLED)
    assert trajectory.sampled_length == header.sampled_length
    kept_T = loss_T & ~np.isin(versions_T, list(stale))
    for each, mask_T in ((header, loss_T), (masked, kept_T)):
        present, counts = np.unique(versions_T[mask_T], return_counts=True)
        counted = dict(zip(present.tolist(), counts.tolist(), strict=True))
        assert each.trained_tokens == counted
        assert each.response_length == np.count_nonzero(mask_T)
    assert trajectory.response_length == np.count_nonzero(loss_T)
    without_loss = decode_trajectory(encode_trajectory(trajectory), masked)
    np.testing.assert_array_equal(without_loss.loss_mask_T, kept_T)
    np.testing.assert_array_equal(without_loss.versions_T, versions_T)
    assert (masked.finish, masked.reward, masked.turn_rewards) == (
        header.finish,
        header.reward,
        header.turn_rewards,
    )


@given(trajectories())
def test_runs_tile_the_tokens_and_neighbours_differ(trajectory):
    tokens, start = [], 0
    runs = trajectory.header.runs
    for version, loss, end in runs:
        assert end > start
        tokens += [(version, loss)] * (end - start)
        start = end
    assert tokens == list(zip(trajectory.versions_T, trajectory.loss_mask_T, strict=True))
    assert all(a[:2] != b[:2] for a, b in pairwise(runs))


# ---- digests


@given(st.lists(IDS, max_size=6), st.lists(IDS, max_size=6))
def test_digests_tell_requests_apart_whatever_holds_their_ids(one, other):
    assert (digest(one) == digest(other)) == (one == other)
    assert digest(one) == digest(array("i", one)) == digest(np.array(one, np.int64))
