"""Scores of a teacher: what is refused, and that they arrive where their tokens do."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.configs.schema import ActorConfig
from slipstream.rollout.reward.judge.wire import REQUEST, EpisodeQuestion, framed_question
from slipstream.rollout.system.stream import FrameReader
from slipstream.rollout.tokens.record import (
    CorruptRecord,
    count_chunk_tokens,
    cut_chunks,
    decode_chunks,
    decode_scores,
    decode_trajectory,
    encode_chunk,
    encode_scores,
    encode_trajectory,
)
from slipstream.rollout.tokens.teacher import TeacherNeeds, TeacherScores
from slipstream.rollout.tokens.trajectory import (
    Completion,
    Finish,
    Prompt,
    Span,
    Trajectory,
    TrajectoryBuilder,
    joined,
)
from tests.tries import tries

NAN = float("nan")


def scores(logps: list[float], top: list[list[tuple[int, float]]] | None = None) -> TeacherScores:
    logp_T = np.array(logps, np.float32)
    if top is None:
        return TeacherScores(logp_T)
    ids = np.array([[id_ for id_, _ in row] for row in top], np.int32)
    return TeacherScores(logp_T, ids, np.array([[logp for _, logp in row] for row in top], np.float32))


def trajectory(prompt: int = 2, sampled: int = 3, teacher: TeacherScores | None = None) -> Trajectory:
    builder = TrajectoryBuilder(range(prompt))
    tokens = tuple(range(10, 10 + sampled))
    builder.add_completion(Completion(tokens, (-1.0,) * sampled, (Span(0, 0, sampled),), Finish.STOP))
    return replace(builder.build(), reward=1.0, teacher=teacher)


def same(a: TeacherScores | None, b: TeacherScores | None) -> bool:
    if a is None or b is None:
        return a is b
    has_a, has_b = ~np.isnan(a.top_logp_TK), ~np.isnan(b.top_logp_TK)
    return (
        np.array_equal(a.logp_T, b.logp_T, equal_nan=True)
        and np.array_equal(has_a, has_b)
        and np.array_equal(a.top_logp_TK[has_a], b.top_logp_TK[has_b])
        and np.array_equal(a.top_ids_TK[has_a], b.top_ids_TK[has_b])
    )


@pytest.mark.parametrize("wrong", [0.1, float("inf"), -float("inf")])
def test_a_value_that_is_no_logprob_is_refused_in_both_arrays(wrong):
    with pytest.raises(ValueError, match="log-probs"):
        scores([wrong])
    with pytest.raises(ValueError, match="top-k log-probs"):
        scores([-1.0], [[(1, wrong)]])


def test_shapes_that_do_not_fit_and_ids_that_are_none_are_refused():
    with pytest.raises(ValueError, match="expected \\[T, K\\]"):
        scores([-1.0, -1.0], [[(1, -1.0)]])
    with pytest.raises(ValueError, match="below 0"):
        scores([-1.0], [[(-1, -1.0)]])
    with pytest.raises(ValueError, match="twice"):
        scores([-1.0], [[(5, -1.0), (5, -2.0)]])
    with pytest.raises(ValueError, match="1 dimensions"):
        TeacherScores(np.zeros((2, 2), np.float32))
    scores([-1.0], [[(5, -1.0), (5, NAN)]])  # an id without a log-prob is not read


def test_a_trajectory_refuses_scores_of_another_number_of_tokens():
    with pytest.raises(ValueError, match="scores of 4 tokens, and 5 tokens"):
        trajectory(2, 3, scores([-1.0] * 4))


LOGPS = st.just(NAN) | st.floats(-50, 0, width=32)


@st.composite
def drawn(draw: st.DrawFn, tokens: int) -> TeacherScores:
    k = draw(st.integers(0, 3))
    logp_T = np.array(draw(st.lists(LOGPS, min_size=tokens, max_size=tokens)), np.float32)
    ids = [draw(st.permutations(range(5)))[:k] for _ in range(tokens)]
    logps = draw(st.lists(LOGPS, min_size=tokens * k, max_size=tokens * k))
    return TeacherScores(
        logp_T,
        np.array(ids, np.int32).reshape(tokens, k),
        np.array(logps, np.float32).reshape(tokens, k),
    )


@given(st.data())
@tries(20)
def test_what_is_stored_comes_back_with_every_token(data):
    whole = trajectory(2, 3, data.draw(drawn(5)))
    assert whole.teacher is not None
    back = decode_trajectory(encode_trajectory(whole), whole.header)
    if not (whole.teacher.has_T.any() or whole.teacher.has_top_T.any()):
        assert back.teacher is None
    else:
        assert same(back.teacher, whole.teacher)
    assert np.array_equal(back.tokens_T, whole.tokens_T)


def test_a_trajectory_without_a_teacher_takes_not_a_byte_more():
    plain, taught = trajectory(), trajectory(teacher=scores([NAN, NAN, -1.0, -1.0, -1.0]))
    assert plain.header == taught.header
    assert len(encode_trajectory(taught)) == len(encode_trajectory(plain)) + 16 + 3 * 4


def test_scores_that_come_later_replace_those_before_wholly():
    whole = trajectory(teacher=scores([NAN, NAN, -1.0, -2.0, -3.0], [[(7, -1.0)]] * 5))
    later = scores([NAN, NAN, NAN, -5.0, NAN])
    stored = encode_trajectory(whole) + encode_scores(later, replaces=True)
    back = decode_trajectory(stored, whole.header)
    assert back.teacher is not None
    np.testing.assert_array_equal(back.teacher.logp_T, later.logp_T)
    assert not back.teacher.has_top_T.any()


def test_scores_behind_the_chunk_of_a_turn_stay_with_it_when_another_chunk_is_cut():
    first, second = encode_chunk([1, 2], [3, 4], [-1.0, -1.0]), encode_chunk([5], [6, 7], [-1.0, -1.0])
    stored = first + second + encode_scores(scores([-0.5, -0.25]))
    cut = cut_chunks(stored, [3, 3])
    whole = trajectory(4, 2)
    taught = decode_trajectory(cut, whole.header)
    assert taught.tokens_T.tolist() == [1, 2, 3, 5, 6, 7]
    assert taught.teacher is not None
    np.testing.assert_array_equal(taught.teacher.logp_T, np.float32([NAN, NAN, NAN, NAN, -0.5, -0.25]))
    assert count_chunk_tokens(cut) == (3, 3)
    assert len(list(decode_chunks(cut))) == 2


@pytest.mark.parametrize("end", [3, 10, 20])
def test_scores_that_are_cut_off_or_reach_before_the_beginning_are_refused(end):
    encoded = encode_scores(scores([-1.0, -2.0]))
    with pytest.raises(CorruptRecord):
        decode_scores(encoded[:end], 2)
    with pytest.raises(CorruptRecord):
        decode_scores(encoded, 1)
    with pytest.raises(CorruptRecord):
        decode_scores(encode_chunk([1], [], []), 1)


def test_siblings_keep_their_own_scores():
    taught, plain = trajectory(1, 2, scores([NAN, -1.0, -2.0])), trajectory(2, 1)
    wide = trajectory(1, 1, scores([NAN, -3.0], [[(1, NAN), (2, NAN)], [(3, -0.5), (4, -1.0)]]))
    whole = joined([taught, plain, wide])
    stored = decode_trajectory(encode_trajectory(whole), whole.header)
    first, second, third = stored.split()
    assert first.teacher is not None and third.teacher is not None and second.teacher is not None
    np.testing.assert_array_equal(first.teacher.logp_T, np.float32([NAN, -1.0, -2.0]))
    assert not first.teacher.has_top_T.any()
    assert not (second.teacher.has_T.any() or second.teacher.has_top_T.any())
    assert same(third.teacher, wide.teacher)


def test_a_reward_sees_the_scores_that_a_workflow_has_set():
    taught = trajectory(teacher=scores([NAN, NAN, -1.0, -2.0, -3.0]))
    [frame] = FrameReader().feed(framed_question(1, Prompt(0, "?"), "", taught))
    question = REQUEST.decode(frame)
    assert isinstance(question, EpisodeQuestion)
    assert same(question.episode.trajectory().teacher, taught.teacher)


def test_a_judgement_replaces_scores_only_if_it_has_any():
    taught = trajectory(teacher=scores([NAN, NAN, -1.0, -2.0, -3.0]))
    assert taught.judged(0.5).teacher is taught.teacher
    other = scores([NAN] * 4 + [-1.0])
    assert taught.judged(0.5, (), other).teacher is other


MODEL = {"type": "teacher", "scores": {"type": "model", "path": "nowhere"}}


@pytest.mark.parametrize(
    ("terms", "needs"),
    [
        ([{"type": "reward"}], TeacherNeeds()),
        ([MODEL], TeacherNeeds()),
        ([{"type": "teacher"}], TeacherNeeds(logps=True, alone=True)),
        ([{"type": "teacher"}, {"type": "reward"}], TeacherNeeds(logps=True)),
        ([{"type": "teacher_topk"}, {"type": "teacher"}], TeacherNeeds(True, True, True)),
        ([{"type": "teacher_topk"}, MODEL], TeacherNeeds(tops=True)),
    ],
)
def test_terms_say_what_is_needed(terms, needs):
    assert TeacherNeeds.of(ActorConfig.model_validate({"advantage": terms})) == needs
