"""Answers in a box, compared as text and as expressions."""

from slipstream.rollout.compat.slime.mathematics import (
    extract_answer,
    extract_boxed_answer,
    grade_answer_mathd,
    grade_answer_sympy,
    grade_answer_verl,
    last_boxed_only_string,
    mathd_normalize_answer,
    remove_boxed,
)
from slipstream.rollout.compat.slime.mathematics import one_spelling as _strip_string

__all__ = [
    "_strip_string",
    "extract_answer",
    "extract_boxed_answer",
    "grade_answer_mathd",
    "grade_answer_sympy",
    "grade_answer_verl",
    "last_boxed_only_string",
    "mathd_normalize_answer",
    "remove_boxed",
]
