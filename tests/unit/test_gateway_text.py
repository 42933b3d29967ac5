"""Text of live completions is that of all tokens up to a stop string, whatever way they are cut."""

import json
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.gateway.serving.text import PATIENCE, GrowingText


def decode(tokens) -> str:
    """Decode tokens that are bytes."""
    return bytes(tokens).decode(errors="replace")


def streamed(text: GrowingText, pieces) -> tuple[list[str], int]:
    """The parts that a client gets, and the number of tokens that belong to the completion."""
    parts, used = [], 0
    for piece in pieces:
        used += text.add(piece)
        parts.append(text.take(final=False))
        if text.matched is not None:
            break
    text.end()
    return [*parts, text.take(final=True)], used


def cut(data: bytes, ends) -> list[list[int]]:
    bounds = [0, *sorted(min(end, len(data)) for end in ends), len(data)]
    return [list(data[start:end]) for start, end in pairwise(bounds)]


CUTS = st.lists(st.integers(0, 60), max_size=12)
TEXT = st.text(alphabet=st.sampled_from("aüß€😀 STOP\n"), max_size=40)


@given(TEXT, CUTS)
def test_text_is_the_same_wherever_characters_are_cut(text, ends):
    parts, used = streamed(GrowingText(decode), cut(text.encode(), ends))
    assert "".join(parts) == text
    assert used == len(text.encode())


ESCAPES = [
    "a",
    "\\\\",
    "\\n",
    "\\ud83d\\ude00",
    "\\uD83D",
    "\\ude00",
    "\\u00fc",
    "\\udbff\\udfff",
    "\\\\ud83d",
    "ü",
]


@given(st.lists(st.sampled_from(ESCAPES), max_size=8).map("".join), CUTS)
def test_no_part_of_json_has_half_a_character(text, ends):
    parts, _ = streamed(GrowingText(decode, whole_pairs=True), cut(text.encode(), ends))
    for end in range(len(parts) + 1):
        with suppress(json.JSONDecodeError):  # cut within another escape
            json.loads(f'"{"".join(parts[:end])}"').encode()
    characters = json.loads(f'"{text}"').encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert json.loads(f'"{"".join(parts)}"') == characters


@given(st.binary(max_size=60), CUTS)
def test_bytes_that_are_no_text_do_not_get_lost(data, ends):
    growing = GrowingText(decode)
    streamed(growing, cut(data, ends))
    assert growing.text.replace("\ufffd", "") == decode(data).replace("\ufffd", "")


@given(TEXT, CUTS, st.sampled_from([["STOP"], ["TO", "STOP"], ["€😀", "P"], ["ß"]]), st.booleans())
def test_a_stop_string_ends_text_and_tokens_wherever_it_is_cut(text, ends, stops, keep):
    starts = [(text.find(stop), stop) for stop in stops if stop in text]
    parts, used = streamed(GrowingText(decode, stops=stops, keep_stop=keep), cut(text.encode(), ends))
    if not starts:
        assert ("".join(parts), used) == (text, len(text.encode()))
        return
    # Bytes come in order: the stop string that is complete first ends the text.
    start, stop = min(starts, key=lambda found: found[0] + len(found[1]))
    assert "".join(parts) == text[: start + len(stop) * keep]
    assert used == len(text[: start + len(stop)].encode())


def test_nothing_of_a_stop_string_leaves_before_it_is_known_not_to_be_one():
    text = GrowingText(decode, stops=["STOP"])
    text.add(b"a ST")
    assert text.take(final=False) == "a "
    text.add(b"AR")
    assert text.take(final=False) == "STAR"
    text.add(b"ST")
    assert text.take(final=False) == ""
    text.end()
    assert text.take(final=True) == "ST"


def test_bytes_that_never_become_a_character_are_given_out_after_a_while():
    text = GrowingText(decode)
    for _ in range(PATIENCE):
        text.add([0xFF])
    assert text.take(final=False) == "\ufffd" * PATIENCE


@pytest.mark.parametrize("tokens", [[], [0x61]])
def test_the_end_may_come_without_tokens(tokens):
    text = GrowingText(decode, stops=["b"])
    text.add(tokens)
    text.end()
    assert text.take(final=True) == decode(tokens)
