"""The reward for multiple choice: which letter a response chooses, in the usual forms."""

import re
from collections.abc import Sequence

from slipstream.rollout.reward.answers import answer_finder, last_boxed
from slipstream.rollout.reward.reasoning import answer_in
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory

_WRAPPER = (
    r"(?:[\s*_$`\"'\u2018\u2019\u201c\u201d({\[<]|\\(?:text|textbf|textrm|mathrm|mathbf|boxed)\b){0,20}"
)
"""Matches the characters that may precede a letter, such as brackets of LaTeX, Markdown and prose."""

_CLOSING = r"[)\]}>*_$`\"'\u2019\u201d\s]*"

_CONNECTED = r"(?:is|was|ist|es|est|would\s+be|should\s+be|must\s+be|has\s+to\s+be|:|=|\uff1a|->|\u2192|\*\*)"
_ADVERB = r"(?:(?:therefore|thus|then|hence|clearly|definitely|obviously|indeed|simply),?\s+)?"
_STATEMENT = (
    r"(?:\b(?:answers?|ans|options?|choices?|antwort|respuesta|r\u00e9ponse)(?:\s+(?:choice|option|correcta))?"
    rf"\s*(?:{_CONNECTED}\s*){{1,3}}{_ADVERB}"
    r"|(?:\u7b54\u6848|\u9078\u9805|\u9009\u9879)\s*(?:\u5e94\u8be5\u662f|\u662f|\u4e3a|\u70ba|\u9009|:|\uff1a|\s){0,3}"
    r"|(?:\u9009\u62e9|\u9009|\u9078\u64c7|\u9078)\s*(?::|\uff1a)?\s*)"
)
"""Begins a sentence that says which answer is right. In Chinese: answer, option; choose."""

_CHOOSE = r"(?i:\b(?:choose|chose|pick|select|go(?:ing)?\s+with|opt\s+for|vote\s+for)\s+)"
_IT_IS = r"(?i:\bit(?:\s+is|'s|\u2019s|\s+must\s+be|\s+has\s+to\s+be|\s+should\s+be)\s+)"
_IS_CORRECT = (
    r"\s+(?i:is|must\s+be|seems|looks)\s+(?i:the\s+)?(?i:only\s+|most\s+)?"
    r"(?i:correct|right|best|true|accurate)\b(?!\s*\?)"
)
_IS_CORRECT_NEXT = re.compile(r"[)\]*_$`\"']*" + _IS_CORRECT)
_WORDS = re.compile(r"[ \t]+[a-z]")
_SO = r"(?i:\b(?:so|thus|therefore|hence|finally|definitely|probably|think|guess|say))"
"""Before a letter that ends the last line."""

_tagged = answer_finder({"tag": "answer"})


class Choice:
    """1.0 for a response that chooses the label, a letter, and 0.0 for any other, none and several included.

    The first of these that a response has counts, and no other: its last ``\\boxed{...}``, its last
    ``<answer>...</answer>``, its last "answer is ..." or "Answer: ...", its last "I choose ...", "... is
    correct" or "it is ...", its last line. There, the letter comes first, or the last line ends with it in
    brackets or after a word such as "therefore". It may be wrapped in brackets, dollars, ``\\text{...}``,
    asterisks or quotes. The text of the choice may follow it, as in "B. Paris". Reasoning
    does not count.
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
        self._stated = re.compile(_STATEMENT + choice, re.IGNORECASE)
        letter = rf"(?:(?i:option|choice|answer)\s)?{_WRAPPER}([{letters}])(?![\w'\u2019])"
        self._chosen = [
            re.compile(_CHOOSE + letter),
            re.compile(_IT_IS + letter + r"(?=[)\]*_$`\"'\s]*(?:[.,;:!\n]|$))"),
            re.compile(
                rf"(?<![\w'])(?<!\bnor )(?<!\bor )(?<!\band )([{letters}])(?=[)\]*_$`\"']*{_IS_CORRECT})"
            ),
        ]
        self._first = re.compile(r"\s*" + choice, re.IGNORECASE)
        self._last = re.compile(rf"(?:[(\[]|{_SO}\W{{1,4}})([{letters}])[)\]]?\W*$")
        self._another = re.compile(rf"{_CLOSING}(?:,|/|&|or\b|and\b)\s*{_WRAPPER}[{letters}](?!\w)")

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        return float(self.chosen(response) == self._label(prompt))

    def chosen(self, response: str) -> str | None:
        """Return the letter that a response chooses; None: it chooses none, or several."""
        response = answer_in(response)
        marked = last_boxed(response)
        if marked is None:
            marked = _tagged(response)
        if marked is not None:
            return self._letter(self._first.match(marked), marked)
        if (stated := self._last_of([self._stated], response)) is None:
            stated = self._last_of(self._chosen, response)
        if stated is not None:
            return self._letter(stated, response, is_sentence=True)
        line = next((line for line in reversed(response.splitlines()) if line.strip()), "")
        return self._letter(self._first.match(line) or self._last.search(line), line)

    def _last_of(self, patterns: Sequence[re.Pattern[str]], response: str) -> re.Match[str] | None:
        """Return the last match whose letter is no word by itself."""
        matches = [match for pattern in patterns for match in pattern.finditer(response)]
        letters = [each for each in matches if not self._is_word(each, response, is_sentence=True)]
        return max(letters, key=lambda match: match.start(1), default=None)

    def _letter(self, choice: re.Match[str] | None, text: str, *, is_sentence: bool = False) -> str | None:
        """Return the letter of a match that is no word by itself and not one of several."""
        if choice is None or self._another.match(text, choice.end()):
            return None
        return None if self._is_word(choice, text, is_sentence=is_sentence) else choice[1].upper()

    def _is_word(self, choice: re.Match[str], text: str, *, is_sentence: bool) -> bool:
        """True if a letter begins a phrase, as in "a good one"."""
        letter = choice[1]
        begins_words = _WORDS.match(text, choice.end()) is not None
        if begins_words and _IS_CORRECT_NEXT.match(text, choice.end()):
            return False
        return begins_words and (letter in "AI" or letter.islower() or not is_sentence)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError for a label that is none of the letters."""
        self._label(prompt)

    def _label(self, prompt: Prompt) -> str:
        label: object = prompt.label
        if isinstance(label, float) and label.is_integer():
            label = int(label)  # a column of numbers of which some are missing
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(self._letters):
            return self._letters[label]
        letter = str(label).strip().strip("().").upper()
        if len(letter) != 1 or letter not in self._letters:
            raise ValueError(
                f"{prompt.reference} has the label {label!r}, expected one of the letters {self._letters} or "
                f"its place, from 0 to {len(self._letters) - 1}"
            )
        return letter
