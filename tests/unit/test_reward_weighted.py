"""The weighted sum of rewards: plain ones, coroutine functions, mappings, and what is wrong with a recipe."""

import asyncio
import inspect
import re

import pytest

from slipstream.rollout.reward import Weighted
from slipstream.rollout.reward.loading import is_concurrent, load_judge
from slipstream.rollout.reward.value import Judgement
from slipstream.rollout.tokens.trajectory import Prompt
from tests.unit.judging import Judging, trajectory

REWARDS = "slipstream.rollout.reward"
EXACT = {"path": f"{REWARDS}.Exact", "weight": 0.75}
REGEX = {"path": f"{REWARDS}.Regex", "args": {"pattern": "4"}, "weight": -0.5}
F1 = {"path": f"{REWARDS}.F1", "weight": 2}


def score(parts, label="4", response="4"):
    value = Weighted(parts).score(Prompt(3, "?", label), response, trajectory())
    return asyncio.run(value) if inspect.isawaitable(value) else value


@pytest.mark.parametrize(
    ("parts", "concurrent", "expected"),
    [
        ({"a": EXACT}, True, {"reward": 0.75, "a": 1.0}),
        ({"a": REGEX}, False, {"reward": -0.5, "a": 1.0}),
        ({"a": EXACT, "b": REGEX}, False, {"reward": 0.25, "a": 1.0, "b": 1.0}),
        ({"a": EXACT, "b": F1}, True, {"reward": 2.75, "a": 1.0, "b": 1.0, "b.exact_match": 1.0}),
        (
            {"b": F1 | {"key": "exact_match"}, "a": REGEX},
            False,
            {"reward": 1.5, "b": 1.0, "b.reward": 1.0, "a": 1.0},
        ),
        ({"w": {"path": "tests.unit.judge_rewards.Wrapped", "weight": 1}}, False, {"reward": 4.0, "w": 4.0}),
    ],
)
def test_the_sum_has_the_weights_of_the_recipe_and_every_part_by_name(parts, concurrent, expected):
    assert is_concurrent(load_judge(f"{REWARDS}.Weighted", {"parts": parts}).call) is concurrent
    assert score(parts) == expected


def test_a_sum_of_sums_is_a_sum():
    inner = {"path": f"{REWARDS}.Weighted", "args": {"parts": {"exact": EXACT, "regex": REGEX}}, "weight": 2}
    expected = {"reward": 0.5, "inner": 0.25, "inner.exact": 1.0, "inner.regex": 1.0}
    assert score({"inner": inner}) == expected


@pytest.mark.parametrize("others", [{}, {"b": EXACT}, {"b": REGEX}])
def test_a_part_that_fails_fails_the_sum(others):
    """A sum without it would be another reward."""
    with pytest.raises(ValueError, match="prompt 3 has the label None"):
        score({"a": EXACT} | others, label=None)


@pytest.mark.parametrize(
    ("value", "reason"),
    [("{'acc': 1}", r"the part a: .*\['acc'\], expected 'reward'"), ("None", "the part a: .*None")],
)
def test_a_part_without_a_number_is_named(value, reason):
    with pytest.raises(ValueError, match=reason):
        score({"a": {"path": "tests.unit.judge_rewards.Parts", "weight": 1}}, response=value)


def test_everything_that_is_wrong_with_the_parts_is_named_at_once():
    parts = {
        "mean": EXACT,
        "reward": EXACT,
        "a b": EXACT,
        "text": "slipstream.rollout.reward.Exact",
        "unknown": EXACT | {"wieght": 1},
        "unweighted": {"path": EXACT["path"]},
        "infinite": EXACT | {"weight": float("inf")},
        "nowhere": {"path": "nowhere.at_all", "weight": 1},
        "group": {"path": "tests.unit.judge_rewards.Lengths", "weight": 1},
        "args": REGEX | {"args": {"patern": "4"}},
        "value": REGEX | {"args": {"pattern": "("}},
        "fine": EXACT,
    }
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Weighted(parts)
    lines = str(error.value).splitlines()
    assert [line.partition(":")[0].removeprefix("parts.") for line in lines] == [
        name for name in parts if name != "fine"
    ]
    for reason in (
        "wieght is unknown",
        "weight: found None",
        "found inf",
        "cannot import nowhere",
        "no method `score`",
    ):
        assert any(reason in line for line in lines)
    assert any(re.search("`patern` is unknown: did you mean `pattern`", line) for line in lines)


def test_a_sum_needs_a_part():
    with pytest.raises(ValueError, match="expected at least one part"):
        Weighted({})


@pytest.mark.parametrize("parts", [{"a": EXACT, "b": F1}, {"a": EXACT, "b": REGEX}])
def test_in_a_judge_process_the_parts_arrive_as_metrics(tmp_path, monkeypatch, parts):
    judging = Judging(tmp_path, monkeypatch)

    async def ask(pool):
        return await pool.score(Prompt(3, "?", "4"), "4", trajectory())

    judgement = judging.use(judging.pool_of(f"{REWARDS}.Weighted", {"parts": parts}), ask)
    expected = score(parts)
    assert judgement == Judgement(expected.pop("reward"), tuple(expected.items()))
