"""The reward that compares mathematical answers with math-verify, which uses SymPy."""

import logging
import math
import re
import time
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

from slipstream.rollout.reward.answers import last_boxed
from slipstream.rollout.reward.reasoning import answer_in
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory

Answer = Literal["any", "boxed"]

LONGEST_LABEL_SHOWN = 200


class MathVerify:
    """1.0 for a response whose answer equals the label by math-verify, 0.0 for any other.

    math-verify knows fractions, decimals, percentages, roots, sets, intervals, matrices, equations and units,
    in LaTeX and in plain text. The label is LaTeX with or without ``$`` or ``\\boxed{...}``, or a number. Of
    several boxes the last one counts, with either setting of ``answer``. Boxes in the reasoning do not.

    A comparison may take minutes. ``score`` is a plain function, so that the time limit of judging ends its
    process: that is a failed attempt at judging, and never a reward of 0. The same response takes as long in
    the next attempt: ``rollout.judging: {timeout_s: 10, attempts: 1}`` gives its group up soon.
    """

    is_accuracy = True

    def __init__(
        self,
        answer: Answer = "any",
        strict: bool = True,
        float_rounding: int = 6,
        longest: int = 20_000,
        timeout_s: int | None = None,
    ) -> None:
        """``answer``: ``boxed`` if only ``\\boxed{...}`` is an answer. ``strict``, ``float_rounding``: as
        ``math_verify.verify`` has them. ``longest``: characters of a response that are read, from its end.
        ``timeout_s``: math-verify's own time limit of each step, in whole seconds; None: there is none. It
        ends a step by a signal, without ending the process, and works in the main thread only.
        """
        if answer not in get_args(Answer):
            raise ValueError(f"answer: found {answer!r}, expected any or boxed")
        if longest < 1:
            raise ValueError(f"longest: found {longest}, expected at least 1 character")
        if timeout_s is not None and (type(timeout_s) is not int or timeout_s < 1):
            raise ValueError(f"timeout_s: found {timeout_s!r}, expected whole seconds, at least 1, or null")
        self._boxed_only = answer == "boxed"
        self._longest = longest
        self._library = _Library(strict, float_rounding, timeout_s)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError for a label that is no text. Whether math-verify can read it shows only later."""
        _as_latex(prompt)

    def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        label = _as_latex(prompt)
        labels = self._library.parsed(_readable(label))
        if not labels:
            shown = str(prompt.label)[:LONGEST_LABEL_SHOWN]
            raise ValueError(f"{prompt.reference} has the label {shown!r}, which math-verify cannot read")
        response = answer_in(response[-self._longest :])
        content = last_boxed(response)
        if content is not None:
            same = _same_form(last_boxed(label) or label, content)
            if same is not None:
                return float(same)
            response = f"\\boxed{{{content}}}"
        elif self._boxed_only:
            return 0.0
        return float(self._library.any_equal(labels, self._library.parsed(_readable(response))))


class _Library:
    """math-verify with errors that tell a time-out from an answer that is wrong.

    By itself it takes a time-out for no answer, or for a wrong one.
    """

    def __init__(self, strict: bool, float_rounding: int, timeout_s: int | None) -> None:
        # Here, because SymPy takes a second to import. math-verify has no types.
        import math_verify  # pyright: ignore[reportMissingTypeStubs]
        from math_verify.errors import TimeoutException  # pyright: ignore[reportMissingTypeStubs]

        logging.getLogger("math_verify").setLevel(
            logging.ERROR
        )  # it warns of time-outs that are switched off
        library = cast(Any, math_verify)
        self._parse = cast("Callable[..., list[object]]", library.parse)
        self._verify = cast("Callable[..., bool]", library.verify)
        self._timeout = cast("type[BaseException]", TimeoutException)
        self._timeout_s = timeout_s
        self._how = {"strict": strict, "float_rounding": float_rounding}

    def parsed(self, text: str) -> list[object]:
        """Return the expressions that are read as the answer; none if there is no answer."""
        return self._call(self._parse, text, parsing_timeout=self._timeout_s, raise_on_error=True) or []

    def any_equal(self, labels: list[object], answers: list[object]) -> bool:
        """True if any answer equals any label."""
        return any(
            self._call(
                self._verify, label, answer, timeout_seconds=self._timeout_s, raise_on_error=True, **self._how
            )
            for label in labels
            for answer in answers
        )

    def _call(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Return what ``function`` returns; None if it cannot make sense of its arguments.

        Raises TimeoutError, MemoryError, and RuntimeError where a time limit cannot work.
        """
        began = time.monotonic()
        try:
            return function(*args, **kwargs)
        except self._timeout:
            raise self._too_long() from None
        except MemoryError:
            raise
        except Exception as error:
            if "threaded environment" in str(error):
                raise RuntimeError(
                    "timeout_s works in the main thread only: leave it out where MathVerify runs elsewhere"
                ) from error
            if self._timeout_s is not None and time.monotonic() - began >= self._timeout_s:
                raise self._too_long() from error  # a library has caught the time-out and raised its own
            return None

    def _too_long(self) -> TimeoutError:
        return TimeoutError(f"math-verify took longer than {self._timeout_s} s (args: timeout_s)")


def _as_latex(prompt: Prompt) -> str:
    """Return the label as math-verify reads it: LaTeX only counts between dollars or in a box."""
    label: object = prompt.label
    is_number = not isinstance(label, float) or math.isfinite(label)
    is_text = not isinstance(label, str) or label.strip().lower() not in ("nan", "none", "null")
    if isinstance(label, bool) or not isinstance(label, str | int | float) or not (is_number and is_text):
        raise ValueError(
            f"{prompt.reference} has the label {label!r}, expected a mathematical expression in a text, or a "
            "number"
        )
    text = str(label).strip()
    return text if "$" in text or "\\boxed" in text or "\\(" in text else f"\\boxed{{{text}}}"


_JOINED = re.compile(r"(?<=[\d}\s])\\text\s*\{[^{}]*\b(?:and|or)\b[^{}]*\}(?=\s*[-+\d\\])")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)")
_ROOT = re.compile(r"\\sqrt\s*\{\s*-\s*(\d{1,12})\s*\}")
_LAST_POINT = re.compile(r"\.(\s*\}\s*)$")


def _readable(latex: str) -> str:
    """Return LaTeX in which math-verify reads what it otherwise would not.

    These are powers of ten as programs print them, roots of negative numbers, another sign of the empty set,
    a full stop at the end of a box, and several numbers that are joined by words.
    """
    latex = latex.replace("\\varnothing", "\\emptyset")
    latex = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", latex)
    latex = _ROOT.sub(_imaginary, latex)
    return _LAST_POINT.sub(r"\1", _JOINED.sub(", ", latex))


def _imaginary(root: re.Match[str]) -> str:
    """Return the root of a negative number as a multiple of i."""
    number = int(root[1])
    whole = math.isqrt(number)
    if whole * whole != number:
        return rf"(i\sqrt{{{root[1]}}})"
    multiple = f"{whole}i" if whole != 1 else "i"
    return (
        f"({multiple})" if root.start() and re.match(r"[\w)}]", root.string[root.start() - 1]) else multiple
    )


_BASE = re.compile(r"([0-9A-Za-z]+)_\{?\s*(\d+)\s*\}?")
_WORD = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_LETTERS = re.compile(r"\(?[A-Z]\)?(?:(?P<between>\s*(?:,|;|\band\b|\s)\s*|)\(?[A-Z]\)?)+")


def _same_form(label: str, answer: str) -> bool | None:
    """Compare what math-verify takes for products of names; None: neither is such a form.

    Numbers in a base, such as ``101_2``: the base counts. Letters of several choices, such as ``A, B, D``.
    Numbers that ``float_rounding`` would take for 0: they differ by a millionth of the label at most.
    """
    label, answer = (" ".join(_WORD.sub(r"\1", each).split()).strip(" .$") for each in (label, answer))
    numbers = [_small(each) for each in (label, answer)]
    if numbers[0] is not None and numbers[1] is not None and 0 < abs(numbers[0]) < _SMALL:
        return abs(numbers[0] - numbers[1]) <= abs(numbers[0]) * 1e-6
    bases = [_BASE.fullmatch(each) for each in (label, answer)]
    if bases[0] is not None:
        return bases[1] is not None and _in_base(bases[0]) == _in_base(bases[1])
    lists = [_LETTERS.fullmatch(each) for each in (label, answer)]
    if all(lists) and any(each is not None and each["between"] for each in lists):
        return sorted(re.findall("[A-Z]", label)) == sorted(re.findall("[A-Z]", answer))
    return None


_SMALL = 1e-4
_POWER = re.compile(
    r"([-+]?\d+(?:\.\d+)?)\s*(?:(?:\\times|\\cdot)\s*10\s*\^\s*\{?\s*|[eE])([-+]?\d{1,3})\s*\}?"
)


def _small(text: str) -> float | None:
    """Return a number that is written with a power of ten, or as a decimal; None: it is another form."""
    power = _POWER.fullmatch(text)
    if power is not None:
        return float(f"{power[1]}e{power[2]}")
    return float(text) if re.fullmatch(r"[-+]?\d{1,20}(?:\.\d{1,20})?", text) else None


def _in_base(number: re.Match[str]) -> object:
    try:
        return int(number[1], int(number[2]))
    except ValueError:
        return number[1], number[2]
