"""Programs in responses, and the cases of prompt sets."""

import json

import pytest

from slipstream.rollout.reward.code_cases import AssertCase, StdioCase, cases_of, last_block, same_output
from slipstream.rollout.tokens.trajectory import Prompt


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("a\n```\n1\n```\nb\n```py\n2\n3\n```\nc", "2\n3\n"),
        ("~~~\n1\n~~~", "1\n"),
        ("````\n```\n1\n```\n````", "```\n1\n```\n"),
        ("```\n1\n~~~\n```", "1\n~~~\n"),
        ("```python\n1\n```\n```python\nprint(", "1\n"),
        ("```\n```", "\n"),
        ("```\n1\n``", None),
        ("print(1)", None),
        ("", None),
        ("```", None),
        ("text ```1```", None),
        ("```\n1\n``` not an end\n2\n```", "1\n``` not an end\n2\n"),
        ("```\n" * 100_001, "\n"),
        ("`" * 10**6, None),
    ],
)
def test_the_last_closed_block_is_the_program(response, program):
    assert last_block(response) == program


STDIO = [StdioCase("1\n", "2\n"), StdioCase("3", "4")]


@pytest.mark.parametrize(
    ("label", "cases"),
    [
        ([{"input": "1\n", "output": "2\n"}, {"input": "3", "output": "4", "id": 7}], STDIO),
        ({"inputs": ["1\n", "3"], "outputs": ["2\n", "4"]}, STDIO),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, [StdioCase("1\n2", "3")]),
        (
            ["assert f(1) == 2", "assert f(2) == 3"],
            [AssertCase("assert f(1) == 2"), AssertCase("assert f(2) == 3")],
        ),
        ("assert f(1) == 2\nassert f(2) == 3", [AssertCase("assert f(1) == 2\nassert f(2) == 3")]),
    ],
)
def test_cases_have_the_forms_of_prompt_sets_and_may_be_json(label, cases):
    assert cases_of(Prompt(3, "?", label), "label") == cases
    assert cases_of(Prompt(3, "?", None, {"tests": label}), "tests") == cases
    assert cases_of(Prompt(3, "?", json.dumps(label)), "label") == cases


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (None, "found NoneType"),
        ([], "has no cases"),
        ({"inputs": [], "outputs": []}, "has no cases"),
        ({"inputs": ["1"], "outputs": []}, "found 1 inputs and 0 outputs"),
        ({"tests": []}, "without the lists `inputs` and `outputs`"),
        ([{"input": "1"}], "a case of type dict without `input` and `output`"),
        ([1], "a case of type int"),
        ([{"input": 1, "output": "1"}], "an input or output of type int"),
        (4, "found int"),
        ("4", "found int"),
    ],
)
def test_a_prompt_without_cases_is_a_failure_that_says_the_forms(label, reason):
    with pytest.raises(ValueError, match=f"prompt 3: label.*{reason}.*expected a list of"):
        cases_of(Prompt(3, "?", label), "label")


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("4\n", "4", True),
        ("4  \n5\n\n", "4\n5", True),
        ("4\r\n5", "4\n5", True),
        ("4 5", "4\n5", False),
        ("44", "4", False),
        ("", "4", False),
        ("\n", "", True),
    ],
)
def test_white_space_at_ends_of_lines_does_not_count(printed, expected, same):
    assert same_output(printed, expected) is same
