"""Completions out of parts: however a completion is split, the parts make the same completion again."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.engine.continuation import ended, head, merge, tokens_left
from slipstream.rollout.trajectory import Completion, Finish, Span


@st.composite
def completions(draw) -> Completion:
    """No two neighbouring spans are of one version, as in the engines' completions."""
    lengths = draw(st.lists(st.integers(1, 8), max_size=5))
    steps = draw(st.lists(st.integers(1, 3), min_size=len(lengths), max_size=len(lengths)))
    spans, start, version = [], 0, 0
    for length, step in zip(lengths, steps, strict=True):
        version += step
        spans.append(Span(version, start, start + length))
        start += length
    tokens = draw(st.lists(st.integers(0, 1000), min_size=start, max_size=start))
    logprobs = draw(st.lists(st.floats(-20, 0), min_size=start, max_size=start))
    return Completion(
        tuple(tokens), tuple(logprobs), tuple(spans), draw(st.sampled_from(Finish)), draw(st.integers(0, 5))
    )


def tail(whole: Completion, n: int) -> Completion:
    """What comes after ``head(whole, n)``, from an independent construction."""
    versions = [int(version) for version in whole.versions()[n:]]
    spans = tuple(Span(version, i, i + 1) for i, version in enumerate(versions))
    return Completion(whole.tokens[n:], whole.logprobs[n:], spans, whole.finish, 0)


@given(completions(), st.data())
def test_any_split_of_a_completion_merges_back_to_it(whole, data):
    n = data.draw(st.integers(0, len(whole.tokens)))
    assert merge(head(whole, n), tail(whole, n)) == whole


@given(completions(), st.lists(st.integers(0, 40), max_size=6))
def test_so_does_any_split_into_many_parts_in_whatever_order_they_are_merged(whole, cuts):
    edges = sorted({0, len(whole.tokens), *(min(cut, len(whole.tokens)) for cut in cuts)})
    parts = [head(tail(whole, a), b - a) for a, b in pairwise(edges)]
    parts.append(tail(whole, len(whole.tokens)))
    from_left = from_right = None
    for part in parts:
        from_left = part if from_left is None else merge(from_left, part)
    for part in reversed(parts):
        from_right = part if from_right is None else merge(part, from_right)
    assert from_left == from_right
    assert (from_left.tokens, from_left.spans, from_left.finish) == (whole.tokens, whole.spans, whole.finish)


@given(completions(), completions())
def test_merging_keeps_every_token_its_log_prob_and_its_version(first, then):
    both = merge(first, then)
    assert both.tokens == first.tokens + then.tokens
    assert both.logprobs == first.logprobs + then.logprobs
    assert both.versions().tolist() == first.versions().tolist() + then.versions().tolist()
    assert all(a.version != b.version for a, b in pairwise(both.spans))
    assert (both.finish, both.retractions) == (then.finish, first.retractions + then.retractions)


@given(completions(), st.data())
def test_a_head_is_a_prefix_that_goes_on(whole, data):
    n = data.draw(st.integers(0, len(whole.tokens)))
    first = head(whole, n)
    assert (first.tokens, first.finish) == (whole.tokens[:n], Finish.PARTIAL)
    assert first.versions().tolist() == whole.versions()[:n].tolist()


def part(n: int, finish: Finish) -> Completion:
    return Completion((7,) * n, (-1.0,) * n, (Span(0, 0, n),) if n else (), finish)


@pytest.mark.parametrize(
    ("so_far", "left"),
    [
        (None, 10),
        (part(0, Finish.PARTIAL), 10),
        (part(4, Finish.PARTIAL), 6),
        (part(10, Finish.PARTIAL), 0),
        (part(12, Finish.PARTIAL), 0),
        (part(4, Finish.STOP), 0),
        (part(4, Finish.LENGTH), 0),
    ],
)
def test_what_is_left_of_the_budget(so_far, left):
    assert tokens_left(so_far, 10) == left


def test_a_completion_that_was_cut_off_at_its_budget_has_ended_by_its_length():
    assert ended(part(3, Finish.PARTIAL)) == part(3, Finish.LENGTH)
    assert ended(part(3, Finish.STOP)) == part(3, Finish.STOP)
