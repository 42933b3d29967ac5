"""Frames between pool and judge: everything arrives as it was sent, and garbage is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.reward.judge.wire import (
    REQUEST,
    Withdrawal,
    framed,
    framed_group,
    framed_question,
)
from slipstream.rollout.system.stream import FrameReader, FrameTooLong
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, Trajectory
from tests.tries import tries

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
    | st.binary(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text("ab"), values, max_size=3),
    max_leaves=6,
)


@st.composite
def trajectories(draw) -> Trajectory:
    length = draw(st.integers(1, 40))
    numbers = np.random.default_rng(draw(st.integers(0, 1000)))
    trained_T = numbers.random(length) < 0.5
    return Trajectory(
        numbers.integers(0, 200_000, length),
        trained_T,
        np.where(trained_T, -numbers.random(length), 0).astype(np.float32),
        np.where(trained_T, numbers.integers(-9, 9, length), UNSAMPLED).astype(np.int32),
        draw(st.sampled_from(Finish)),
        draw(st.integers(0, 9)),
        draw(st.none() | st.floats(-2, 2)),
        draw(st.sampled_from([(), ((length, 0.5),)])),
        draw(st.sampled_from([(), (("format", 0.25), ("length", -1.0))])),
        siblings=draw(st.sampled_from([(), (1, length)])) if length > 1 else (),
    )


@tries(20)
@given(st.integers(0, 2**40), PLAIN, st.dictionaries(st.text("abc"), PLAIN), st.text("aä€😀"), trajectories())
def test_a_question_arrives_as_it_was_asked(number, label, metadata, response, trajectory):
    prompt = Prompt(7, [{"role": "user", "content": "2+2?"}], label, metadata)
    [frame] = FrameReader().feed(framed_question(number, prompt, response, trajectory))
    question = REQUEST.decode(frame)
    assert question.number == number
    arrived_prompt, arrived_response, arrived = question.arguments()
    assert (arrived_prompt, arrived_response) == (prompt, response)
    assert_same(arrived, trajectory)


@tries(10)
@given(st.lists(st.tuples(st.text("aä€😀"), trajectories()), max_size=4))
def test_a_question_about_a_group_arrives_in_its_order(episodes):
    prompt = Prompt(7, "2+2?", "4", {"level": 1})
    responses, sent = [response for response, _ in episodes], [each for _, each in episodes]
    [frame] = FrameReader().feed(framed_group(3, prompt, responses, sent))
    question = REQUEST.decode(frame)
    assert question.number == 3
    arrived_prompt, arrived_responses, arrived = question.arguments()
    assert (arrived_prompt, arrived_responses) == (prompt, responses)
    for each, other in zip(arrived, sent, strict=True):
        assert_same(each, other)


def assert_same(arrived: Trajectory, trajectory: Trajectory) -> None:
    for field in ("tokens_T", "loss_mask_T", "logprobs_T", "versions_T"):
        sent_T, arrived_T = getattr(trajectory, field), getattr(arrived, field)
        assert arrived_T.dtype == sent_T.dtype and arrived_T.flags.writeable
        np.testing.assert_array_equal(arrived_T, sent_T)
    for field in ("finish", "retractions", "reward", "turn_rewards", "reward_parts", "siblings"):
        assert getattr(arrived, field) == getattr(trajectory, field)


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(1, 50))
def test_frames_are_found_wherever_the_stream_is_cut(numbers, piece):
    stream = b"".join(framed(Withdrawal(number)) for number in numbers)
    reader = FrameReader()
    pieces = [stream[start : start + piece] for start in range(0, len(stream), piece)]
    frames = [frame for part in pieces for frame in reader.feed(part)]
    assert [REQUEST.decode(frame).number for frame in frames] == numbers


def test_a_frame_that_is_too_long_is_refused_before_it_has_arrived():
    with pytest.raises(FrameTooLong, match=f"a frame of {2**64 - 1} bytes, expected at most 1000"):
        FrameReader(longest=1000).feed(b"\xff" * 8)
