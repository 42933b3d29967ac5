"""Rewards by name: what slime's rules say of answers."""

import asyncio
from argparse import Namespace

import pytest

from slipstream.rollout.compat.slime import make_slime_importable


@pytest.fixture(autouse=True)
def _slime():
    make_slime_importable()


@pytest.mark.parametrize(
    ("given", "expected", "is_right"),
    [
        ("42", "42", True),
        ("1,234", "1234", True),
        (r"\frac{2}{3}", "2/3", True),
        (r"\frac{4}{6}", "2/3", False),
        ("x^2+2x+1", "(x+1)^2", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        (r"(1, \frac{1}{2})", r"(1,\frac{1}{2})", True),
        ("(1,2)", "[1,2)", False),
        ("40+2", "42", False),
        ("__import__('os').system('true')", "0", False),
        ("9**9**9**9", "1", False),
        ("9^9^9^9", "x", False),
        ("", "42", False),
    ],
)
def test_boxed_answers_are_compared_as_expressions(given, expected, is_right):
    from slime.rollout.rm_hub.math_utils import grade_answer_verl

    assert grade_answer_verl(f"so \\boxed{{{given}}}", expected) is is_right


def test_the_last_whole_box_counts():
    from slime.rollout.rm_hub.math_utils import extract_answer

    assert extract_answer(r"\boxed{1} then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert extract_answer(r"\boxed{1") is None


def test_a_choice_is_named_by_its_letter_or_its_position():
    from slime.rollout.rm_hub.gpqa import compute_gpqa_reward

    assert compute_gpqa_reward("The answer is C.", "B", {"choices": ["a", "b", "c"]}) == 0.0
    assert compute_gpqa_reward("Answer: B", 1, {"choices": ["x", "y"]}) == 1.0


@pytest.mark.parametrize(
    ("rule", "response", "label", "reward"),
    [
        ("math", r"\boxed{7}", "7", 1),
        ("boxed_f1", r"\boxed{the cat}", "cat", 1.0),
        ("gpqa", "Answer: A", "A", 1.0),
        ("deepscaler", r"hm</think>\boxed{7}", "7", 1),
    ],
)
def test_a_sample_names_its_rule(rule, response, label, reward):
    from slime.rollout.rm_hub import async_rm
    from slime.utils.types import Sample

    sample = Sample(response=response, label=label, metadata={"rm_type": rule})
    assert asyncio.run(async_rm(Namespace(custom_rm_path=None, rm_type=None), sample)) == reward


def test_an_unknown_rule_is_an_error_that_lists_the_known_ones():
    from slime.rollout.rm_hub import async_rm
    from slime.utils.types import Sample

    with pytest.raises(NotImplementedError, match=r"'nothing'.*deepscaler.*remote_rm"):
        asyncio.run(async_rm(Namespace(custom_rm_path=None, rm_type="nothing"), Sample()))


def test_the_response_begins_at_the_first_token_that_carries_loss():
    from slime.utils.mask_utils import get_response_lengths

    assert get_response_lengths([[0, 1, 0, 1], [0, 0], [1]]) == [3, 0, 1]
