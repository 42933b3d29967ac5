"""Answers in a box, compared as text and as expressions."""

import re
from typing import Any, cast

_LONGEST_EXPRESSION = 300
"""Characters of an answer beyond which it is not handed to SymPy."""

_WILD = re.compile(r"[^\w+\-*/^().]|__|\*\*|\^\(|\^\d+\^|\^\d\d|!")
"""Matches expressions that SymPy may need endless time for, or must not evaluate."""

_UNITS = "degree|centimeter|cm|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard"
_NAMES = {"infty": "oo", "cdot": "*", "times": "*", "cup": "U"}
"""Commands of LaTeX that SymPy calls otherwise."""


def last_box(text: str, commands: tuple[str, ...]) -> str | None:
    """Return the last of LaTeX ``commands`` with its braces; None: its braces do not close."""
    start = next((place for name in commands if (place := text.rfind(f"{name}{{")) >= 0), -1)
    if start < 0:
        return None
    depth = 0
    for place in range(text.index("{", start), len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start : place + 1]
    return None


def last_boxed_only_string(string: str) -> str | None:
    """Return the last `\\boxed{...}`, or else the last `\\fbox{...}`; None: there is no whole one."""
    return last_box(string, ("\\boxed", "\\fbox"))


def remove_boxed(s: str | None) -> str | None:
    """Return what is in a `\\boxed{...}`; None for anything else."""
    if s is None or not (s.startswith("\\boxed{") and s.endswith("}")):
        return None
    return s[len("\\boxed{") : -1]


def extract_boxed_answer(solution: str) -> str | None:
    return remove_boxed(last_boxed_only_string(solution))


def extract_answer(passage: str) -> str | None:
    """Return what the last box of a text holds; None: there is no box."""
    return extract_boxed_answer(passage) if "\\boxed" in passage else None


def _without_text_command(answer: str) -> str:
    match = re.fullmatch(r"\\text\{(.+?)\}", answer.strip())
    return (match[1] if match else answer).strip()


def mathd_normalize_answer(answer: str | None) -> str | None:
    """Return an answer as the MATH data set writes it; None for None."""
    return None if answer is None else _strip_string(_without_text_command(answer))


def _strip_string(string: str) -> str:
    """Return LaTeX in one spelling: no spaces, units, degrees and sizes of brackets; whole fractions."""
    text = string.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = re.sub(r"\\[td]frac", r"\\frac", text)
    text = re.sub(r"\\(?:left|right)(?![a-z])", "", text)
    text = re.sub(r"\^(?:\{\\circ\}|\\circ)|\\\$|\\%", "", text)
    text = text.partition("\\text{ ")[0]
    text = re.sub(r"(^|[ {])\.", r"\g<1>0.", text)
    text = re.sub(r"^[^=]{0,2}=([^=]*)$", r"\1", text).replace(" ", "")
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac([^{\\])([^{\\])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([^{\\])\{", r"\\frac{\1}{", text)
    if text == "0.5":
        return "\\frac{1}{2}"
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def grade_answer_mathd(given_answer: str | None, ground_truth: str | None) -> bool:
    """Return whether two answers are the same text in one spelling."""
    return mathd_normalize_answer(given_answer) == mathd_normalize_answer(ground_truth)


def _as_expression(answer: str) -> str:
    """Return LaTeX as an expression that SymPy reads."""
    text = _without_text_command(answer).replace("\\!", "")
    text = re.sub(r"\\[td]?frac", " \\\\frac", text).replace("\\sqrt", "sqrt")
    while (plain := re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"(\1)/(\2)", text)) != text:
        text = plain
    text = re.sub(r"\((\w+)\)/\((\w+)\)", r"\1/\2", text)
    text = re.sub(r"\\(\w+)", lambda match: _NAMES.get(match[1], match[1]), text)
    text = text.replace(" or ", ",").replace(" and ", ",").replace("million", "*10^6")
    text = text.replace("billion", "*10^9").replace("trillion", "*10^12").lower()
    text = re.sub(rf"(?:{_UNITS})(?:es)?s? *(?:\^\d+)?|\^ *\{{? *circ *\}}?|[$%\\]", "", text)
    text = re.sub(r"(\d),(?=\d{3}(?!\d))", r"\1", text)
    text = re.sub(r"(\d) +(?=\d)", r"\1+", text)  # mixed numbers
    text = text.replace("sqrt{", "sqrt(").replace("{", "(").replace("}", ")") if "{" in text else text
    text = text.replace(" ", "")
    is_whole = re.fullmatch(r"-?\d+(?:\.0*)?", text)
    return text.partition(".")[0] if is_whole else text


def _parts(expression: str) -> list[str]:
    """Return the elements of a tuple or an interval; the expression itself if it is neither."""
    if len(expression) > 2 and expression[0] in "([" and expression[-1] in ")]" and "," in expression:
        return [expression[0], *expression[1:-1].split(","), expression[-1]]
    return [expression]


def _are_equal(given: str, expected: str) -> bool:
    if given == expected:
        return True
    fraction = re.compile(r"-?\d+/\d+")
    if fraction.fullmatch(expected) and fraction.fullmatch(given):
        return False  # a fraction is expected in the terms in which it is asked for
    if re.fullmatch(r"-?\d+", expected):
        return False  # a number that has to be worked out is no answer
    return _have_equal_values(given, expected)


def _have_equal_values(given: str, expected: str) -> bool:
    difference = f"({given})-({expected})"
    if len(difference) > _LONGEST_EXPRESSION or _WILD.search(difference):
        return False
    import sympy  # pyright: ignore[reportMissingTypeStubs]
    from sympy.parsing import sympy_parser  # pyright: ignore[reportMissingTypeStubs]

    library, parser = cast("Any", sympy), cast("Any", sympy_parser)  # SymPy has no types
    names = {name: value for name, value in vars(sympy).items() if not name.startswith("_")}
    rules = (*parser.standard_transformations, parser.implicit_multiplication_application)
    text = difference.replace("^", "**")
    try:
        value = parser.parse_expr(text, {}, transformations=rules, global_dict={**names, "__builtins__": {}})
        return bool(library.simplify(value) == 0)
    except Exception:  # SymPy raises whatever it likes about a text that is no expression
        return False


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Return whether two answers are equal as expressions, or as tuples of them."""
    given, expected = _parts(_as_expression(given_answer)), _parts(_as_expression(ground_truth))
    if not all(given) or len(given) != len(expected):
        return False
    return all(map(_are_equal, given, expected))


def grade_answer_verl(solution_str: str, ground_truth: str) -> bool:
    """Return whether the box of a solution holds the expected answer, which may be in a box itself."""
    if not ground_truth:
        return False
    expected = extract_answer(ground_truth) if "\\boxed" in ground_truth else ground_truth
    given = extract_answer(solution_str)
    if given is None or expected is None:
        return False
    return grade_answer_mathd(given, expected) or grade_answer_sympy(given, expected)
