"""MathVerify: the examples of math-verify's own documentation, and responses that are made to do harm."""

import asyncio
import re
import threading

import pytest

from slipstream.rollout.reward import MathVerify
from slipstream.rollout.reward.judge.judge_pool import JudgingFailed
from slipstream.rollout.reward.loading import is_concurrent
from slipstream.rollout.tokens.trajectory import Prompt
from tests.unit.judging import Judging, trajectory


def score(label, response, **args):
    return MathVerify(**args).score(Prompt(3, "?", label), response, trajectory())


@pytest.mark.parametrize(
    ("label", "response", "reward"),
    [
        # From the documentation of math-verify.
        ("${1,3} \\cup {2,4}$", "${1,2,3,4}$", 1.0),
        ("1/2", "The answer is $\\frac{1}{2}$", 1.0),
        ("\\frac{1}{2}", "The answer is 1/2", 1.0),
        # Not symmetric there: an inequality as the label takes an interval, but not the other way round.
        ("$1 < x < 2$", "$(1,2)$", 1.0),
        ("$(1,2)$", "$1 < x < 2$", 0.0),
        # Numbers, sets, units, matrices, roots.
        ("0.25", "\\boxed{\\frac14}", 1.0),
        (0.25, "\\boxed{1/4}", 1.0),
        (4, "so it is 4.", 1.0),
        ("4", "\\boxed{5}", 0.0),
        ("\\{1,2,3\\}", "\\boxed{\\{3,2,1\\}}", 1.0),
        ("\\{1,2,3\\}", "\\boxed{\\{3,2\\}}", 0.0),
        ("(1,2]", "\\boxed{(1,2]}", 1.0),
        ("(1,2]", "\\boxed{(1,2)}", 0.0),
        ("10 cm", "\\boxed{10}", 1.0),
        ("10", "\\boxed{10\\text{ cm}}", 1.0),
        ("50\\%", "\\boxed{0.5}", 1.0),
        ("x=5", "\\boxed{5}", 1.0),
        ("\\sqrt{8}", "\\boxed{2\\sqrt{2}}", 1.0),
        ("$\\begin{pmatrix}1\\\\2\\end{pmatrix}$", "\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", 1.0),
        ("\\boxed{4}", "$2+2$", 1.0),
        ("C", "\\boxed{C}", 1.0),
        # No answer, or none that can be read.
        ("4", "", 0.0),
        ("4", "no idea", 0.0),
        ("4", "\\boxed{", 0.0),
        ("4", "\\boxed{}", 0.0),
        ("4", "\\boxed{" + "{" * 5000, 0.0),
        ("4", "{" * 20_000 + "}" * 20_000, 0.0),
        ("4", "\x00\ud800\uffff" * 100, 0.0),
        ("4", "9" * 20_000, 0.0),
        ("4", "\\boxed{\\frac{1}{0}}", 0.0),
        ("4", "\\boxed{__import__('os').system('true')}", 0.0),
    ],
)
def test_answers_are_compared_as_mathematics(label, response, reward):
    assert score(label, response) == reward


def test_only_the_end_of_a_response_is_read():
    assert score("4", "\\boxed{4}" + " " * 100, longest=50) == 0.0
    assert score("4", "x" * 10**7 + "\\boxed{4}") == 1.0


def test_with_boxed_nothing_else_counts():
    assert score("4", "The answer is 4", answer="boxed") == 0.0
    assert score("4", "The answer is 5, \\boxed{3} or \\boxed{4}", answer="boxed") == 1.0


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (None, "expected a mathematical expression"),
        (["4"], "expected a mathematical expression"),
        ("", "which math-verify cannot read"),
    ],
)
def test_a_label_that_cannot_be_read_is_a_failure_and_no_wrong_answer(label, reason):
    with pytest.raises(ValueError, match=reason):
        score(label, "\\boxed{4}")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"answer": "box"}, "answer: found 'box', expected any or boxed"),
        ({"longest": 0}, "longest: found 0"),
        ({"timeout_s": 0}, "timeout_s: found 0, expected whole seconds"),
        ({"timeout_s": 0.5}, "timeout_s: found 0.5"),
    ],
)
def test_arguments_are_checked(args, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        MathVerify(**args)


ENDLESS = ["\\boxed{9^{9^{9^{9}}}}", "\\boxed{(1000000!)!}"]


@pytest.mark.parametrize("response", ENDLESS)
def test_its_own_time_limit_is_a_failure_and_no_wrong_answer(response):
    """math-verify itself takes a time-out for a wrong answer."""
    with pytest.raises(TimeoutError, match=r"math-verify took longer than 1 s \(args: timeout_s\)"):
        score("1", response, timeout_s=1)


def test_off_the_main_thread_only_its_own_time_limit_fails():
    outcomes: list[object] = []

    def work() -> None:
        outcomes.append(score("4", "\\boxed{4}"))
        try:
            score("4", "\\boxed{4}", timeout_s=60)
        except RuntimeError as error:
            outcomes.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert outcomes[0] == 1.0
    assert "timeout_s works in the main thread only" in str(outcomes[1])


def test_a_judge_process_ends_a_comparison_that_does_not_end(tmp_path, monkeypatch):
    assert not is_concurrent(MathVerify().score), "only the process of a plain function can be ended"
    judging = Judging(tmp_path, monkeypatch)

    async def ask(pool):
        async def about(number, response):
            return (await pool.score(Prompt(number, "?", "4"), response, trajectory())).reward

        responses = [ENDLESS[0], "\\boxed{4}", "\\boxed{5}"]
        return await asyncio.gather(
            *(about(number, response) for number, response in enumerate(responses)), return_exceptions=True
        )

    pool = judging.pool_of("slipstream.rollout.reward.MathVerify", timeout_s=8.0)
    failed, *rewards = judging.use(pool, ask)
    assert isinstance(failed, JudgingFailed)
    assert "longer than 8 s (rollout.judging.timeout_s)" in str(failed)
    assert rewards == [1.0, 0.0]
