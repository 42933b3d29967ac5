"""The reward for multiple choice: which letter a response chooses, in the usual forms."""

import re

from slipstream.rollout.reward.answers import last_boxed
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory

_WRAPPER = (
    r"(?:[\s*_$`\"'\u2018\u2019\u201c\u201d({\[<]|\\(?:text|textbf|textrm|mathrm|mathbf|boxed)\b){0,20}"
)
"""Matches the characters that may precede a letter, such as brackets of LaTeX, Markdown and prose."""

_CLOSING = r"[)\]}>*_$`\"'\u2019\u201d\s]*"


class Choice:
    """1.0 for a response that chooses the label, a letter, and 0.0 for any other, none and several included.

    The first of these that a response has counts, and no other: its last ``\\boxed{...}``, its last "answer
    is ..." or "Answer: ...", its last line. There, the letter comes first, or the last line ends with it in
    brackets. It may be wrapped in brackets, dollars, ``\\text{...}``, asterisks or quotes. The text of the
    choice may follow it, as in "B. Paris".
    """

    is_accuracy = True

    def __init__(self, letters: str = "ABCDEFGHIJ") -> None:
        """``letters``: those that can be chosen, in upper case."""
        if not re.fullmatch(r"[A-Z]{2,}", letters) or len(set(letters)) < len(letters):
            raise ValueError(
                f"letters: found {letters!r}, expected at least two different letters from A to Z"
            )
        self._letters = letters
        choice = rf"(?:option\s|choice\s)?{_WRAPPER}([{letters}])(?![\w'\u2019])"
        statement = r"\banswers?(?:\s+choice)?\s*(?:(?:is|:|=|\*\*)\s*){1,3}"
        self._stated = re.compile(statement + choice, re.IGNORECASE)
        self._first = re.compile(r"\s*" + choice, re.IGNORECASE)
        self._last = re.compile(rf"[(\[]([{letters}])[)\]]\W*$")
        self._another = re.compile(rf"{_CLOSING}(?:,|/|&|or\b|and\b)\s*{_WRAPPER}[{letters}](?!\w)")

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        return float(self.chosen(response) == self._label(prompt))

    def chosen(self, response: str) -> str | None:
        """Return the letter that a response chooses; None: it chooses none, or several."""
        boxed = last_boxed(response)
        if boxed is not None:
            return self._letter(self._first.match(boxed), boxed)
        stated = list(self._stated.finditer(response))
        if stated:
            return self._letter(stated[-1], response, is_sentence=True)
        line = next((line for line in reversed(response.splitlines()) if line.strip()), "")
        return self._letter(self._first.match(line) or self._last.search(line), line)

    def _letter(self, choice: re.Match[str] | None, text: str, *, is_sentence: bool = False) -> str | None:
        """Return the letter of a match that is no word by itself and not one of several."""
        if choice is None or self._another.match(text, choice.end()):
            return None
        letter = choice[1]
        begins_words = re.compile(r"[ \t]+[a-z]").match(text, choice.end()) is not None
        may_be_a_word = letter in "AI" or letter.islower()
        return None if begins_words and (may_be_a_word or not is_sentence) else letter.upper()

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError for a label that is none of the letters."""
        self._label(prompt)

    def _label(self, prompt: Prompt) -> str:
        label: object = prompt.label
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(self._letters):
            return self._letters[label]
        letter = str(label).strip().strip("().").upper()
        if len(letter) != 1 or letter not in self._letters:
            raise ValueError(
                f"{prompt.reference} has the label {label!r}, expected one of the letters {self._letters} or "
                f"its place, from 0 to {len(self._letters) - 1}"
            )
        return letter
