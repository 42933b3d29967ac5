"""The answer after the reasoning, as DeepScaleR grades it."""

from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_mathd, grade_answer_sympy


def get_deepscaler_rule_based_reward(response: str, label) -> int:
    """Return 1 if the boxed answer after `</think>` or `###Response` equals ``label``, else 0."""
    if "</think>" in response:
        conclusion = response.rpartition("</think>")[2]
    elif "###Response" in response:
        conclusion = response.split("###Response")[1]
    else:
        return 0
    given, expected = extract_answer(conclusion), str(label)
    if "\\boxed" in expected:
        expected = extract_answer(expected)
    if given is None or not expected:
        return 0
    return int(grade_answer_mathd(given, expected) or grade_answer_sympy(given, expected))
