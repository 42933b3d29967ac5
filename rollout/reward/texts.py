"""Rewards that compare texts: exactly, by a regular expression, by common words."""

import math
import re
import string
import unicodedata
from collections import Counter, deque
from collections.abc import Sequence
from typing import cast

from slipstream.rollout.reward.answers import answer_finder
from slipstream.rollout.tokens.trajectory import Finish, Prompt, Trajectory


class FinalAnswer:
    """1.0 for a response that ends by itself, with the label after its only ``marker``; 0.0 otherwise.

    White space around the label is ignored on both sides.
    """

    is_accuracy = True

    def __init__(self, marker: str = "#") -> None:
        if not marker:
            raise ValueError("marker must not be empty")
        self._marker = marker

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError for a prompt without a label."""
        if prompt.label is None:
            raise ValueError(f"{prompt.reference} has no label to compare with")
        _forms(prompt.label, prompt)

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        self.check_prompt(prompt)
        _, marker, answer = response.partition(self._marker)
        well_formed = marker != "" and self._marker not in answer and trajectory.finish is Finish.STOP
        return float(
            well_formed and answer.strip() in [each.strip() for each in _forms(prompt.label, prompt)]
        )


class Exact:
    """1.0 for a response whose answer is the label, 0.0 for any other. A label may be a list of such texts.

    White space at both ends is ignored, and inside it counts as one blank.
    """

    is_accuracy = True

    def __init__(self, answer: object = "all", ignore_case: bool = False) -> None:
        """``answer``: where the answer is: ``rollout.reward.answers`` has the forms."""
        self._find = answer_finder(answer)
        self._ignore_case = ignore_case

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError for a prompt without a label to compare with."""
        labels_of(prompt)

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        answer = self._find(response)
        labels = [self._normal(label) for label in labels_of(prompt)]
        return float(answer is not None and self._normal(answer) in labels)

    def _normal(self, text: str) -> str:
        text = unicodedata.normalize("NFC", " ".join(text.split()))
        return text.casefold() if self._ignore_case else text


class Regex:
    """1.0 for a response in which a regular expression is found, 0.0 for any other.

    With a group named ``answer`` in the expression, what the last match has there must be the label, white
    space at both ends aside. An expression that backtracks without end is ended by the time limit of judging.
    """

    is_accuracy = True

    def __init__(self, pattern: str, ignore_case: bool = False) -> None:
        """``pattern``: an expression of Python's ``re``. ``.`` matches line ends too."""
        try:
            flags = re.DOTALL | (re.IGNORECASE if ignore_case else re.NOFLAG)
            self._pattern = re.compile(pattern, flags)
        except re.error as error:
            raise ValueError(f"pattern: {pattern!r} is no regular expression: {error}") from error
        self._has_answer = "answer" in self._pattern.groupindex

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError for a prompt without a label, if the expression has an answer to compare with
        it."""
        if self._has_answer:
            labels_of(prompt)

    def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        if not self._has_answer:
            return float(self._pattern.search(response) is not None)
        labels = [label.strip() for label in labels_of(prompt)]
        last = deque(self._pattern.finditer(response), maxlen=1)
        answer = last[0]["answer"] if last else None
        return float(answer is not None and answer.strip() in labels)


class F1:
    """SQuAD's F1 of the words that answer and label have in common; the exact match is a further part.

    Of several labels the best counts. Both are compared without punctuation, articles and case. A question
    without an answer has an empty label, and is answered by nothing. Source: arXiv:1606.05250, 6.1, and
    arXiv:1806.03822, with the published evaluation script.
    """

    def __init__(self, answer: object = "all") -> None:
        """``answer``: where the answer is: ``rollout.reward.answers`` has the forms. None of it: F1 is 0."""
        self._find = answer_finder(answer)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError for a prompt without a label to compare with."""
        labels_of(prompt)

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> dict[str, float]:
        labels = [_words(label) for label in labels_of(prompt)]
        answer = self._find(response)
        if answer is None:
            return {"reward": 0.0, "exact_match": 0.0}
        words = _words(answer)
        return {
            "reward": max(_f1(words, label) for label in labels),
            "exact_match": float(words in labels),
        }


def labels_of(prompt: Prompt) -> Sequence[str]:
    """Return the texts that are right. Raises ValueError if there are none: nothing can be judged."""
    label: object = prompt.label
    labels = cast("Sequence[object]", label) if isinstance(label, list | tuple) else [label]
    texts = [form for each in labels if isinstance(each, str | int | float) for form in _forms(each, prompt)]
    if not texts or any(each is None for each in labels):
        raise ValueError(
            f"{prompt.reference} has the label {label!r}, expected a text to compare with, or a list of them"
        )
    return texts


def _forms(label: object, prompt: Prompt) -> list[str]:
    """Return the texts that mean a label: columns of tables have 18 as 18.0, and JSON has True as true.

    Raises ValueError for NaN, which stands for a missing value, and for an infinite number.
    """
    if isinstance(label, bool):
        return [str(label), str(label).lower()]
    if not isinstance(label, float):
        return [str(label)]
    if not math.isfinite(label):
        raise ValueError(f"{prompt.reference} has the label {label!r}, expected a value: it is missing")
    return [str(int(label)), str(label)] if label.is_integer() else [str(label)]


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def _words(text: str) -> list[str]:
    """Return the words of a text as SQuAD's script normalizes them."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _f1(answer: list[str], label: list[str]) -> float:
    if not answer or not label:
        return float(answer == label)
    common = (Counter(answer) & Counter(label)).total()
    return 2 * common / (len(answer) + len(label))
