"""The text of a completion while its tokens come, cut off at the first stop string. Pure.

    tokens   "gr" "ü"[:1] | "ü"[1:] "n ST" | "OP" "!"        stop: "STOP"
    text     "gr"         | "ün "          | ""              the stop string and all behind it are left out

Text is only ever added: an incomplete character waits for its other bytes, and an end that may begin a stop
string waits until it is one or not.
"""

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"
"""Decoders put this in the place of bytes that are no character, or none yet."""

PATIENCE = 16
"""Number of tokens after which bytes that are no character are taken for what they are."""

WINDOW = 8
"""Largest number of tokens that are decoded again with those that follow."""


class GrowingText:
    """Decodes tokens as they come."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], *, stops: Sequence[str] = (), keep_stop: bool = False
    ) -> None:
        """``keep_stop``: the stop string that ends the text stays in it."""
        self._decode = decode
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
        before = self._state()
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
        return self.text[start:ready]

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
        """Look for a stop string that ends behind ``length``: the one that begins first."""
        matches = [
            (start, stop)
            for stop in self._stops
            if (start := self.text.find(stop, max(0, length - len(stop) + 1))) >= 0
        ]
        if matches:
            start, stop = min(matches)
            self._stop_at(stop, start)

    def _stop_at(self, stop: str, start: int) -> None:
        self.matched = stop
        self.text = self.text[: start + len(stop) if self._keep_stop else start]

    def _held(self) -> int:
        """Return the length of the longest end of the text with which a stop string begins."""
        return max(
            (
                length
                for stop in self._stops
                for length in range(min(len(stop) - 1, len(self.text)), 0, -1)
                if self.text.endswith(stop[:length])
            ),
            default=0,
        )

    def _state(self) -> tuple[int, int, int, str, str]:
        return len(self._ids), self._read, self._context, self._context_text, self.text

    def _restore(self, state: tuple[int, int, int, str, str]) -> None:
        length, self._read, self._context, self._context_text, self.text = state
        del self._ids[length:]
        self.matched = None
