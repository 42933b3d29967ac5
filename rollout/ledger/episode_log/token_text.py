"""Tokens as text: whole responses, and the piece of text that each token adds."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from slipstream.rollout.tokens.tokenizer import Decode, load_tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""Stands where bytes are no whole character."""

LONGEST_CHARACTER = 4
"""Bytes of the longest character in UTF-8, each of which may be a token."""


def load_decoder(model: Path) -> Decode:
    """Return the decoder of a model folder. Raises OSError and ValueError.

    A folder with tokenizer.json needs no transformers, whose import takes seconds.
    """
    file = model / "tokenizer.json"
    if file.exists():
        from tokenizers import Tokenizer

        backend = Tokenizer.from_file(str(file))
        return lambda ids: backend.decode(list(ids), skip_special_tokens=False)
    tokenizer = load_tokenizer(model)
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def text_when_needed(load: Callable[[], Decode]) -> "Callable[[], TokenText]":
    """Return a function whose first call loads the decoder, and whose every call returns its text."""
    return cache(lambda: TokenText(load()))


class TokenText:
    """Decodes pieces of one vocabulary. Each token id is decoded once."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._piece = cache(self._decoded)
        self._parts: set[int] = set()
        """Tokens that are no whole character."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds. A character of several tokens belongs to its first one, and
        the others have an empty text.
        """
        pieces = list(map(self._piece, ids))
        if self._parts.isdisjoint(ids):
            return pieces
        place = 0
        while place < len(ids):
            taken = 1
            if BROKEN in pieces[place]:
                for more in range(2, min(LONGEST_CHARACTER, len(ids) - place) + 1):
                    joined = self.decode(ids[place : place + more])
                    if joined and BROKEN not in joined:
                        pieces[place : place + more] = [joined, *[""] * (more - 1)]
                        taken = more
                        break
            place += taken
        return pieces

    def _decoded(self, token: int) -> str:
        """Return the text of a token after another one: some tokenizers drop the first space of a text."""
        twice, once = self.decode((token, token)), self.decode((token,))
        piece = twice[len(once) :] if twice.startswith(once) else once
        if BROKEN in piece:
            self._parts.add(token)
        return piece
