"""A policy that says anything: reasoning, tool calls, every kind of text, and what nobody should say."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.exactness.dialects import Call, Dialect, as_the_template_does

STOPS = ("END", "\n\nUser:", "😀!", "é", "</answer>", "ß n", "}}")
"""Stop strings that clients ask for, and that the policy likes to write."""

TEXTS = (
    "the cat in the hat", "to the end.", "Grüße aus Köln", "naïve façade", "数学は楽しい", "مرحبا بالعالم",
    "😀😃", "👩\u200d👩\u200d👧\u200d👦", "🏳️\u200d🌈", "e\u0301a\u0308o\u0302", "नमस्ते", "{\"a\": 1}",
    "1 < 2 </b>", "\tx\n\n", " ", "a  b", "\u200b\ufeff", "\"quoted\" \\ back", "<|im_end|", "NaN",
    "\U0001d518\U0001d52b\U0001d526", "\x7f\x01", "ok",
)  # fmt: skip

FUNCTIONS = ("weather", "search", "run_code")
KEYS = ("city", "query", "code", "days", "ü")


def words(draw: random.Random, most: int) -> str:
    """Return some text."""
    return "".join(draw.choice(TEXTS) for _ in range(draw.randint(1, most)))


def arguments(draw: random.Random) -> dict[str, Any]:
    """Return arguments of a call."""

    def value(depth: int) -> Any:
        kinds = ["text", "number", "bool", "null", "float", *(["list", "object"] if depth else [])]
        match draw.choice(kinds):
            case "text":
                return words(draw, 2)
            case "number":
                return draw.randint(-5, 10**9)
            case "bool":
                return draw.random() < 0.5
            case "null":
                return None
            case "float":
                return draw.choice([0.5, 2.0, -1e-7, 3e20])
            case "list":
                return [value(depth - 1) for _ in range(draw.randint(0, 2))]
            case _:
                return {key: value(depth - 1) for key in draw.sample(KEYS, draw.randint(0, 2))}

    return {key: value(1) for key in draw.sample(KEYS, draw.randint(0, 3))}


class Policy:
    """Writes answers as ids."""

    def __init__(self, dialect: Dialect, tokenizer: PreTrainedTokenizerFast) -> None:
        self.dialect = dialect
        self.tokenizer = tokenizer
        self.end = int(tokenizer.convert_tokens_to_ids(dialect.end))
        self.other_end = int(tokenizer.convert_tokens_to_ids(dialect.specials[0]))
        """Another token with which engines end an answer, and which the template does not write."""
        self._markers = {text: int(tokenizer.convert_tokens_to_ids(text)) for text in dialect.markers}
        vocab = tokenizer.get_vocab()
        special = set(self._markers.values())
        symbols = {token: number for token, number in vocab.items() if number not in special}
        self._by_bytes = {
            bytes(_ALPHABET[symbol] for symbol in token): number for token, number in symbols.items()
        }
        self._longest = max(map(len, self._by_bytes))

    def answer(self, draw: random.Random, prompt: Sequence[int]) -> list[int]:
        """Return an answer to a prompt, with the token that ends it."""
        has_thought = self.tokenizer.decode(prompt[-12:]).endswith("</think>\n\n")
        ids = self.spell(self._text(draw, has_thought=has_thought), draw)
        if draw.random() < 0.03:  # bytes that are no characters
            place = draw.randint(0, len(ids))
            ids[place:place] = [self._by_bytes[bytes([draw.randint(128, 255)])] for _ in range(3)]
        return [*ids, self.other_end if draw.random() < 0.03 else self.end]

    def _text(self, draw: random.Random, *, has_thought: bool) -> str:
        dialect = self.dialect
        thought = ""
        if dialect.thought is not None and not has_thought and draw.random() < 0.9:
            before, behind = dialect.thought
            thought = before + words(draw, 2) + (behind if draw.random() < 0.97 else "")
        text = ""
        if draw.random() < 0.7:
            text = ("" if draw.random() < 0.8 else draw.choice(" \n")) + words(draw, 3)
            if draw.random() < 0.25:
                text += draw.choice(STOPS) + words(draw, 1)
        if dialect.calls is not None and draw.random() < 0.35:
            most = dialect.most_calls if draw.random() < 0.95 else 2
            calls = [(draw.choice(FUNCTIONS), arguments(draw)) for _ in range(draw.randint(1, most))]
            if dialect.most_calls == 1 and draw.random() < 0.8:
                text = ""  # nothing stands before a call
            text += ("\n" if text and dialect.most_calls > 1 else "") + self._calls(calls, draw)
        if draw.random() < 0.03:
            text += draw.choice(dialect.words or ("plain",))
        return thought + text

    def _calls(self, calls: Sequence[Call], draw: random.Random) -> str:
        assert self.dialect.calls is not None
        style = draw.random()
        if style < 0.8:
            return self.dialect.calls(calls, as_the_template_does)
        if style < 0.9:
            return self.dialect.calls(calls, lambda value: json.dumps(value, separators=(",", ":")))
        text = self.dialect.calls(calls, json.dumps)
        return text if style < 0.97 else text[: draw.randint(1, len(text))]

    def spell(self, text: str, draw: random.Random) -> list[int]:
        """Return ids of a text: one of its many tokenizations."""
        ids: list[int] = []
        while text:
            place, marker = self._next_marker(text)
            ids += self._cut(text[:place].encode("utf-8", "replace"), draw)
            if marker:
                as_token = draw.random() < 0.95
                ids += [self._markers[marker]] if as_token else self._cut(marker.encode(), draw)
            text = text[place + len(marker) :]
        return ids

    def _next_marker(self, text: str) -> tuple[int, str]:
        places = [(text.find(marker), marker) for marker in self._markers]
        return min(((place, marker) for place, marker in places if place >= 0), default=(len(text), ""))

    def _cut(self, data: bytes, draw: random.Random) -> list[int]:
        ids: list[int] = []
        while data:
            sizes = [size for size in range(1, self._longest + 1) if data[:size] in self._by_bytes]
            size = draw.choice([sizes[-1], sizes[-1], *sizes]) if len(data) >= sizes[-1] else sizes[0]
            ids.append(self._by_bytes[data[:size]])
            data = data[size:]
        return ids


def _alphabet() -> Mapping[str, int]:
    """Return the byte of each symbol of byte-level tokenizers: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _alphabet()
