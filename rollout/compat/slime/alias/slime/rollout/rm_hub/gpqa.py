"""Multiple choice, as in GPQA."""

import re
import string
from collections.abc import Iterable, Mapping
from typing import Any, cast

DEFAULT_VALID_LETTERS = list(string.ascii_uppercase[:10])

_NAMED = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?:answer|option|choice)\s*(?:is|:)?\s*([A-Z])",
        r"([A-Z])\s*is\s*(?:the\s*)?correct",
        r"final\s*(?:answer|option)\s*(?:is|:)?\s*([A-Z])",
    )
]
"""Phrases that name the chosen letter, the most telling first."""


def _conclusion(text: str) -> str:
    return text.rpartition("</think>")[2]


def _words(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def _extract_letter_from_response(response: str | None, valid_letters: Iterable[str]) -> str | None:
    """Return the letter that a response chooses; None: none of the valid ones."""
    text = _conclusion(response or "")
    valid = {letter.upper() for letter in valid_letters}
    named = (match[1].upper() for pattern in _NAMED if (match := pattern.search(text)))
    standing_alone = reversed(re.findall(r"\b[A-Z]\b", text))
    return next((letter for letter in (*named, *standing_alone) if letter in valid), None)


def compute_gpqa_reward(
    response: str | None, label: object, metadata: Mapping[str, Any] | None = None
) -> float:
    """Return 1.0 if a response chooses what ``label`` or ``metadata`` says is correct, else 0.0.

    ``label``: a letter, a position from 0, or the text of a choice. ``metadata`` may hold `choices`,
    `valid_letters`, `correct_letter`, and `correct_answer` or `answer_text`.
    """
    if response is None:
        return 0.0
    facts = metadata or {}
    choices = _choices(facts.get("choices"))
    letters = [str(letter).upper() for letter in facts.get("valid_letters") or ()]
    letters = letters or (list(string.ascii_uppercase[: len(choices)]) or DEFAULT_VALID_LETTERS)
    text = label.strip() if isinstance(label, str) else ""
    correct = _correct_letter(facts.get("correct_letter"), label, text, letters, choices)
    chosen = _extract_letter_from_response(response, letters)
    if chosen and correct:
        return float(chosen == correct)
    answers = [text, facts.get("correct_answer"), facts.get("answer_text")]
    if correct is not None and correct in letters and letters.index(correct) < len(choices):
        answers.append(choices[letters.index(correct)])
    said = _words(_conclusion(response))
    if any(words in said for answer in answers if answer and (words := _words(str(answer)))):
        return 1.0
    return float(chosen is not None and chosen == text.upper())


def _choices(given: object) -> list[str]:
    if isinstance(given, Mapping):
        return [str(choice) for choice in cast("Mapping[object, object]", given).values()]
    return [str(choice) for choice in cast("Iterable[object]", given or ())]


def _correct_letter(
    given: object, label: object, text: str, letters: list[str], choices: list[str]
) -> str | None:
    if isinstance(label, int | float) and 0 <= int(label) < len(letters):
        return letters[int(label)]
    if isinstance(given, str) and given.strip():
        return given.strip().upper()
    if len(text) == 1 and text.upper() in letters:
        return text.upper()
    same = [position for position, choice in enumerate(choices) if text and _words(choice) == _words(text)]
    return letters[same[0]] if same and same[0] < len(letters) else None
