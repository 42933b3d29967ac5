"""Functions with verl's signature as rewards."""

import asyncio
import inspect

import pytest

from slipstream.rollout.reward import ComputeScore
from slipstream.rollout.reward.loading import is_concurrent, load_judge
from slipstream.rollout.reward.value import Judgement, NoNumber
from slipstream.rollout.tokens.trajectory import Prompt
from tests.unit.judging import trajectory

HERE = "tests.unit.test_reward_compute_score"
PROMPT = Prompt(
    3, "?", "4", {"data_source": "openai/gsm8k", "extra_info": {"index": 7}, "ability": "math"}, source="math"
)


def plain(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("openai/gsm8k", {"index": 7})
    return solution_str == ground_truth


async def mapping(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    await asyncio.sleep(0)
    return {"score": len(ground_truth) + bonus, "acc": True, "pred": solution_str, "tokens": None}


def no_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}


def by_source(data_source, solution_str, ground_truth, extra_info=None):
    return {"math": 1, None: 2}[data_source]


def other(text):
    return 1.0


def score(function, prompt=PROMPT, **args):
    value = ComputeScore(f"{HERE}.{function}", **args).score(prompt, "4", trajectory())
    return asyncio.run(value) if inspect.isawaitable(value) else value


def test_a_function_gets_its_columns_and_returns_a_number():
    assert score("plain") == Judgement(1.0)


def test_a_coroutine_function_with_a_mapping_is_asked_side_by_side():
    assert score("mapping", args={"bonus": 0.5}) == Judgement(1.5, (("acc", 1.0),))
    assert is_concurrent(
        load_judge("slipstream.rollout.reward.ComputeScore", {"function": f"{HERE}.mapping"}).call
    )


def test_without_a_column_the_data_source_is_the_name_of_the_source():
    assert score("by_source", Prompt(0, "?", "4", source="math")) == Judgement(1.0)
    assert score("by_source", Prompt(0, "?", "4")) == Judgement(2.0)


def test_a_mapping_without_a_score_is_no_reward():
    with pytest.raises(NoNumber, match="expected 'score' among them"):
        score("no_score")


def test_a_prompt_without_a_label_says_where_verl_has_it():
    with pytest.raises(ValueError, match=r"prompt 0 has no label.*reward_model\.ground_truth"):
        score("plain", Prompt(0, "?"))


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        ("other", {}, r"cannot be called with \(data_source, solution_str, ground_truth, extra_info\)"),
        ("plain", {"bonus": 1}, r"extra_info, bonus\): got an unexpected keyword argument 'bonus'"),
        ("nothing", {}, "nothing"),
    ],
)
def test_a_function_of_another_shape_is_refused_when_the_recipe_is_checked(function, args, message):
    with pytest.raises(Exception, match=message):
        ComputeScore(f"{HERE}.{function}", args)
