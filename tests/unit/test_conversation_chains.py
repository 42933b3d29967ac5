"""Answers that were cut off within a character: their last bytes stay only where the answer is repeated."""

import pytest

from slipstream.rollout.tokens.conversation.chains import append, continue_text
from slipstream.rollout.tokens.trajectory import Finish

HALF = "é".encode()[:1]


def decode(ids) -> str:
    return bytes(ids).decode(errors="replace")


def encode(text: str) -> list[int]:
    return list(text.encode())


def closing(_message, _text) -> str:
    return "<end>"


def cut_off(text: str):
    """A chain of bytes whose answer ends within a character."""
    answer = {"role": "assistant", "content": text}
    ids = list(text.encode() + HALF)
    return append(append(None, list(b"<ask>"), "<ask>"), ids, None, answer, Finish.LENGTH)


@pytest.mark.parametrize("text", ["", "abc", "ü"])
def test_an_answer_that_is_repeated_keeps_its_bytes(text):
    tail = cut_off(text)
    extended = continue_text(tail, f"<ask>{text}<end>more", encode, decode, closing)
    assert (extended.differs, extended.shared) == (None, tail.length)


@pytest.mark.parametrize("text", ["", "abc", "ü"])
@pytest.mark.parametrize("other", ["é", "x", "é and more"])
def test_an_answer_that_is_rewritten_does_not(text, other):
    tail = cut_off(text)
    prompt = f"<ask>{text}{other}<end>more"
    extended = continue_text(tail, prompt, encode, decode, closing)
    assert extended.differs is tail
    ids = b"".join(bytes(segment.ids.tolist()) for segment in (extended.tail.before, extended.tail))
    assert ids.decode() == prompt
