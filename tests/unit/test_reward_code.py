"""Programs in responses, and the cases of prompt sets."""

import json

import pytest

from slipstream.rollout.reward.code_cases import (
    AssertCase,
    CallCase,
    StdioCase,
    Uses,
    cases_of,
    program_in,
    same_output,
    uses_of,
)
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
        ("```python\nprint(5)\n```\nOutput:\n```\n5\n```", "print(5)\n"),
        ("```python\nprint(5)\n```\nRun:\n```bash\npython x.py\n```", "print(5)\n"),
        ("```\nprint(5)\n```\nOutput:\n```\n5 6\n```", "print(5)\n"),
        ("```\nprint(5)\n```\nOutput:\n```\n5\n```\n```text\nx = 1\n```", "print(5)\n"),
        ("```Python3\nprint(1)\n```\n```python\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(1)\n```\n```python\nprint(\n```", "print(\n"),
        ("```cpp\nint x;\n```", "int x;\n"),
    ],
)
def test_the_last_closed_block_that_can_be_a_program_is_the_program(response, program):
    assert program_in(response) == program


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\ndef f(): pass\n```\nUse it:\n```python\nprint(f())\n```", "def f(): pass\n"),
        ("```python\ndef f(): 1\n```\n```python\ndef f(): 2\n```", "def f(): 2\n"),
        ("```\nf = g\n```\n```\n>>> f(1)\n2\n```", "f = g\n"),
        ("```python\nclass Solution:\n    def f(self): pass\n```\n```python\nx = 1\n```", None),
        ("```python\ndef g(): pass\n```\n```python\nprint(1)\n```", "print(1)\n"),
    ],
)
def test_a_block_that_only_uses_the_functions_of_the_program_is_not_the_program(response, program):
    found = program_in(response, {"f"})
    assert found == (program or "class Solution:\n    def f(self): pass\n")


@pytest.mark.parametrize(
    ("label", "metadata", "cases"),
    [
        (
            {"fn_name": "f", "inputs": [[1, [2]], [[3]]], "outputs": [4, [5]]},
            {},
            [CallCase("f", [1, [2]], (4,)), CallCase("f", [[3]], ([5], 5))],
        ),
        ({"fn_name": "f", "inputs": ["[1, 2]\n3"], "outputs": ["6"]}, {}, [CallCase("f", [[1, 2], 3], (6,))]),
        (
            [{"input": '"a"\n2', "output": "null", "testtype": "functional", "metadata": {"func_name": "f"}}],
            {},
            [CallCase("f", ["a", 2], (None,))],
        ),
        (
            [{"input": "1", "output": "2", "testtype": "functional"}],
            {"metadata": '{"func_name": "f"}'},
            [CallCase("f", [1], (2,))],
        ),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], {"fn_name": None}, [StdioCase("1", "2")]),
        (
            [{"type": "function_call", "fn_name": "f", "input": [1], "output": 2}],
            {},
            [CallCase("f", [1], (2,))],
        ),
    ],
)
def test_cases_that_name_a_function_are_calls(label, metadata, cases):
    assert cases_of(Prompt(3, "?", label, metadata), "label") == cases


@pytest.mark.parametrize(
    ("statements", "names"),
    [
        ("assert f(1) == 2", ("f",)),
        ("import math\nassert math.isclose(f(1), g(2))", ("f", "g")),
        ("x = 3\nassert [f(y) for y in range(x)] == []", ("f",)),
        ("def check(candidate):\n    assert candidate(1) == 2\ncheck(f)", ("f",)),
        ("assert sum(1, 2) == 3", ("sum",)),
        ("assert decode(encode('a')) == 'a'", ("decode", "encode")),
        ("assert f(f(1)) == 2", ("f",)),
        ("s = Stack()\ns.push(1)\nassert s.pop() == 1", ("Stack",)),
    ],
)
def test_names_that_statements_do_not_define_are_those_of_the_program(statements, names):
    assert uses_of(statements).names == names


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        ("assert f(1 ==", "statements that are no Python"),
        (
            "def check(candidate):\n    assert candidate(1) == 2",
            "use nothing of the program.*must also be called",
        ),
        ("assert 1 == 1", "use nothing of the program"),
        ("assert same(f(1), 2)", "`same`, which they do not define, judges the result of `f`"),
        ("assert np.isclose(f(1), 2)", "`np`, which they do not define, judges the result of `f`"),
        (
            "def check(candidate):\n    assert abs(poly(candidate(1))) < 1\ncheck(f)",
            "`poly`, which they do not define, judges the result of `candidate`.*put the code of `poly`",
        ),
    ],
)
def test_statements_that_cannot_test_a_program_are_refused(statements, reason):
    with pytest.raises(ValueError, match=f"prompt 3: label: found {'.*'}{reason}"):
        cases_of(Prompt(3, "?", [statements]), "label")


USES = Uses(("f",))
STDIO = [StdioCase("1\n", "2\n"), StdioCase("3", "4")]


@pytest.mark.parametrize(
    ("label", "cases"),
    [
        ([{"input": "1\n", "output": "2\n"}, {"input": "3", "output": "4", "id": 7}], STDIO),
        ({"inputs": ["1\n", "3"], "outputs": ["2\n", "4"]}, STDIO),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, [StdioCase("1\n2", "3")]),
        (
            ["assert f(1) == 2", "assert f(2) == 3"],
            [AssertCase("assert f(1) == 2", USES), AssertCase("assert f(2) == 3", USES)],
        ),
        ("assert f(1) == 2\nassert f(2) == 3", [AssertCase("assert f(1) == 2\nassert f(2) == 3", USES)]),
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
        ([{"input": "1", "output": "1", "testtype": "functional"}], "without the name of the function"),
        ([{"input": "1", "output": "1", "testtype": "other"}], "testtype 'other'"),
        ({"fn_name": "f", "inputs": ["x"], "outputs": ["1"]}, "an input of a function that is no JSON: 'x'"),
        (
            {"fn_name": "f", "inputs": [1], "outputs": [1]},
            "an input of type int, expected a list of arguments",
        ),
        (
            {"fn_name": "f g", "inputs": [[1]], "outputs": [1]},
            "fn_name 'f g', expected the name of a function",
        ),
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
        ("x 0.5", "x 0.50", True),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("0.5  1", "0.50 1", False),
        ("0.51", "0.50", False),
        ("nan", "0.5", False),
        ("1e1", "10.0", False),
    ],
)
def test_white_space_at_ends_of_lines_does_not_count(printed, expected, same):
    assert same_output(printed, expected) is same
