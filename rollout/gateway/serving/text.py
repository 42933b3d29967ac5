"""The text of a completion while its tokens come, cut off at the first stop string. Pure.

    tokens   "gr" "ü"[:1] | "ü"[1:] "n ST" | "OP" "!"        stop: "STOP"
    text     "gr"         | "ün "          | ""              the stop string and all after it are left out

Text is only ever added: an incomplete character waits for its other bytes, and an end that may begin a stop
string waits until it is one or not.
"""

import re
from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"
"""Decoders put this in place of bytes that are no character, or none yet."""

PATIENCE = 16
"""Number of tokens after which bytes that are no character are taken for what they are."""

WINDOW = 8
"""Largest number of tokens that are decoded again with those that follow."""

_ESCAPE = r"(?<!\\)((?:\\\\)*)"
"""Where a backslash begins an escape: an even number of backslashes is before it."""

_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LOW_BEGUN = r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?"
_PAIR_BEGUN = re.compile(_ESCAPE + rf"(\\(?:u(?:[dD][0-9a-fA-F]{{0,2}})?)?|{_HIGH}{_LOW_BEGUN})$")
_PAIR_OR_HALF = re.compile(_ESCAPE + f"({_HIGH}{_LOW}|{_HIGH}|{_LOW})")
_LONGEST_PAIR = 12


class GrowingText:
    """Decodes tokens as they come."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        whole_pairs: bool = False,
    ) -> None:
        """``keep_stop``: the stop string that ends the text stays in it. ``whole_pairs``: ``take`` returns
        both halves of a surrogate pair that is written as JSON escapes together, and U+FFFD for a half alone.
        SGLang's streaming parsers read each part of a tool call as JSON, and cannot send half a character.
        """
        self._decode = decode
        self._whole_pairs = whole_pairs
        self._stops = [stop for stop in stops if stop]
        self._keep_stop = keep_stop
        self._ids: list[int] = []
        self._read = self._context = 0
        """Tokens before ``_read`` are decoded; from ``_context`` on they are decoded once more with what
        follows, because a token's text may depend on the one before it."""
        self._context_text = ""
        self.text = ""
        """All of the text so far, with an end that may yet become a stop string."""
        self.matched: str | None = None
        """The stop string that was found. Nothing is added any more then."""
        self._given = 0

    def add(self, tokens: Sequence[int]) -> int:
        """Decode further tokens. Return how many of them belong to the completion.

        These are all, or fewer if a stop string was found: those up to the one that completed it.
        """
        if not self._stops:
            self._extend(tokens)
            return len(tokens)
        before = len(self._ids), self._read, self._context, self._context_text, self.text
        self._extend(tokens)
        if self.matched is None:
            return len(tokens)
        self._restore(before)
        for used, token in enumerate(tokens, start=1):
            self._extend([token])
            if self.matched is not None:
                return used
        return len(tokens)

    def end(self) -> None:
        """Decode what still waits: no token follows."""
        if self.matched is None:
            self._advance(final=True)

    def take(self, *, final: bool) -> str:
        """Return the text since the last call. Unless ``final``, a possible start of a stop string waits."""
        ready = len(self.text) if final or self.matched is not None else len(self.text) - self._held()
        start, self._given = self._given, max(ready, self._given)
        taken = self.text[start:ready]
        return _without_halves(taken) if self._whole_pairs else taken

    def _extend(self, tokens: Sequence[int]) -> None:
        self._ids += tokens
        self._advance(final=False)

    def _advance(self, *, final: bool) -> None:
        """Add the text of all tokens but those of a character that may not be complete yet."""
        end = len(self._ids)
        if end == self._read:
            return
        least = max(self._read, end - PATIENCE)
        new = self._text_until(end)
        while not final and new.endswith(INCOMPLETE) and end > least:
            end -= 1
            new = self._text_until(end)
        if end == self._read:
            if len(self._ids) - self._read < PATIENCE:
                return
            end, new = len(self._ids), self._text_until(len(self._ids))
        length = len(self.text)
        self.text += new
        if end - self._context < WINDOW and not new.endswith(INCOMPLETE):
            self._read = end
            self._context_text += new
        else:
            self._context, self._read = self._read, end
            self._context_text = self._decode(self._ids[self._context : end])
        self._find_stop(length)

    def _text_until(self, end: int) -> str:
        """Return the text of the tokens from ``_read`` to ``end``."""
        return self._decode(self._ids[self._context : end])[len(self._context_text) :]

    def _find_stop(self, length: int) -> None:
        """Look for a stop string that ends after ``length``: the one that begins first."""
        matches = [
            (start, stop)
            for stop in self._stops
            if (start := self.text.find(stop, max(0, length - len(stop) + 1))) >= 0
        ]
        if matches:
            start, stop = min(matches)
            self.matched = stop
            self.text = self.text[: start + len(stop) if self._keep_stop else start]

    def _held(self) -> int:
        """Return the length of the longest end of the text with which a stop string, or a pair, begins."""
        pair = _PAIR_BEGUN.search(self.text[self._given :]) if self._whole_pairs else None
        return max(0 if pair is None else len(pair[2]), self._held_by_stops())

    def _held_by_stops(self) -> int:
        return max(
            (
                length
                for stop in self._stops
                for length in range(min(len(stop) - 1, len(self.text)), 0, -1)
                if self.text.endswith(stop[:length])
            ),
            default=0,
        )

    def _restore(self, state: tuple[int, int, int, str, str]) -> None:
        length, self._read, self._context, self._context_text, self.text = state
        del self._ids[length:]
        self.matched = None


def _without_halves(text: str) -> str:
    """Return a text with U+FFFD in place of each escaped half of a surrogate pair that stands alone."""

    def whole(escape: re.Match[str]) -> str:
        return escape[0] if len(escape[2]) == _LONGEST_PAIR else escape[1] + INCOMPLETE

    return _PAIR_OR_HALF.sub(whole, text) if "\\u" in text else text
