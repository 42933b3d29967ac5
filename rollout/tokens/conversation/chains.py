"""A chain: the ids that a branch consists of, and the text that they stand for in a rendered prompt.

A chain is a linked list of segments. A segment is the context that a prompt has added, or an answer. Chains
share their first segments, so that a turn costs what it adds.

    context "<user>Hi<assistant>" | answer "Hello.<end>" | context "\\n<user>Bye<assistant>" | answer ...

The next prompt is rendered as text, whole, and compared with the chain segment by segment. Where all of them
are repeated, only the rest is encoded: the ids before it are those of the chain, however the tokenizer would
cut their text today. Where one is not, the prompt is encoded anew from the beginning of that segment, and
the first id that differs is found.

An answer's ids may stand for a little more text than a prompt repeats of it, see ``_cuts``.
"""

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from slipstream.rollout.tokens.conversation.sameness import text_of
from slipstream.rollout.tokens.tokenizer import Decode
from slipstream.rollout.tokens.trajectory import Finish

Encode = Callable[[str], Sequence[int]]
"""Returns the ids of a part of a rendered text."""

Closing = Callable[[Mapping[str, object] | None, str], str]
"""Returns the text that the template writes after the text of an answer, given the answer's message and text;
without a message: after an answer that is text alone."""


def closing_of(render: Callable[[list[dict[str, Any]]], str]) -> Closing:
    """Return the ``Closing`` of a chat template. It returns "" where the template does not show its text.

    ``render``: writes messages by the template. Raises ValueError for messages that the template refuses.
    """

    def behind(message: Mapping[str, object], text: str) -> str:
        try:
            _, known, closing = render([_QUESTION, dict(message)]).rpartition(text)
        except ValueError:
            return ""
        return closing if known else ""

    behind_text = cache(partial(behind, {"role": "assistant", "content": _ANSWERED}, _ANSWERED))

    def closing(message: Mapping[str, object] | None, text: str) -> str:
        return (behind(message, text) if message is not None and text else "") or behind_text()

    return closing


def _nothing(_message: Mapping[str, object] | None, _text: str) -> str:
    return ""


_ANSWERED = "An answer."
_QUESTION = {"role": "user", "content": "?"}


_BYTES_PER_ID = 8
"""Memory of an id: four bytes, and about four characters of text."""
_SEGMENT_BYTES = 300
"""Memory of a segment without its ids and text."""


@dataclass(slots=True, eq=False)
class Segment:
    """Context or an answer, and all segments before it."""

    before: "Segment | None"
    ids: "array[int]"
    text: str | None
    """None: not decoded yet."""
    length: int
    """Number of ids up to the end of the segment."""
    answer: Mapping[str, object] | None
    """The message of an answer; None: context."""
    finish: Finish | None
    """Why the answer ended; None: context."""

    @property
    def start(self) -> int:
        """Number of ids before the segment."""
        return self.length - len(self.ids)


class Extended(NamedTuple):
    """A prompt that continues a chain."""

    tail: Segment | None
    """Its last segment; None: it has no ids."""
    shared: int
    """Number of ids that it has in common with the chain, from the beginning."""
    differs: Segment | None
    """The first segment of the chain that the prompt does not repeat."""


def append(
    before: Segment | None,
    ids: Sequence[int],
    text: str | None,
    answer: Mapping[str, object] | None = None,
    finish: Finish | None = None,
) -> Segment:
    """Return a segment that follows ``before``: context, or the answer with a message and a finish."""
    return Segment(before, array("i", ids), text, length_of(before) + len(ids), answer, finish)


def length_of(tail: Segment | None) -> int:
    """Return the number of ids of a chain."""
    return 0 if tail is None else tail.length


def size_of(segment: Segment) -> int:
    """Return about how much memory a segment takes, without those before it, in bytes."""
    return _SEGMENT_BYTES + _BYTES_PER_ID * len(segment.ids)


def segments_of(tail: Segment | None) -> list[Segment]:
    """Return the segments of a chain, the first one first."""
    segments: list[Segment] = []
    while tail is not None:
        segments.append(tail)
        tail = tail.before
    segments.reverse()
    return segments


def ids_of(tail: Segment | None) -> "array[int]":
    """Return the ids of a chain."""
    ids = array("i")
    for segment in segments_of(tail):
        ids.extend(segment.ids)
    return ids


def continue_text(
    tail: Segment | None, prompt: str, encode: Encode, decode: Decode, closing: Closing = _nothing
) -> Extended:
    """Return the prompt with the text ``prompt``, whose ids are as much of the chain as its text repeats."""
    last, offset, differs = _repeated(tail, prompt, decode, closing)
    rest = encode(prompt[offset:]) if offset < len(prompt) else ()
    shared = length_of(last)
    if differs is not None:
        shared += _common(array("i", rest), ids_of(tail)[shared:])
    if not rest:
        return Extended(last, shared, differs)
    return Extended(append(last, rest, prompt[offset:]), shared, differs)


def continue_ids(tail: Segment | None, prompt: Sequence[int]) -> Extended:
    """Return the prompt with the ids ``prompt``. Its segments are those of the chain that it repeats."""
    ids = array("i", prompt)
    segments = segments_of(tail)
    shared = _common(ids, ids_of(tail))
    last: Segment | None = None
    differs: Segment | None = None
    for segment in segments:
        if segment.length > shared:
            differs = segment
            break
        last = segment
    rest = ids[length_of(last) :]
    return Extended(append(last, rest, None) if rest else last, shared, differs)


def repeats(tail: Segment | None, ids: Sequence[int], text: str | None, decode: Decode) -> bool:
    """True if a prompt repeats a chain whole, by its text if that is known."""
    if text is not None:
        return _repeated(tail, text, decode)[2] is None
    length = length_of(tail)
    return len(ids) >= length and array("i", ids[:length]) == ids_of(tail)


def resume(tail: Segment | None, shared: int, context: Sequence[int]) -> Segment | None:
    """Return a prompt that repeats the first ``shared`` ids of a chain and adds ``context``."""
    last = tail
    while last is not None and last.length > shared:
        last = last.before
    missing = ids_of(tail)[length_of(last) : shared] if shared > length_of(last) else array("i")
    rest = missing + array("i", context)
    return append(last, rest, None) if rest else last


def _repeated(
    tail: Segment | None, prompt: str, decode: Decode, closing: Closing = _nothing
) -> tuple[Segment | None, int, Segment | None]:
    """Return the last segment that a text repeats, its end in the text, and the segment after it."""
    last: Segment | None = None
    offset = 0
    for segment in segments_of(tail):
        text = _text(segment, decode)
        if prompt.startswith(text, offset):
            end = offset + len(text)
        elif (cut := _cut(segment, text, prompt, offset, decode, closing)) is not None:
            end = offset + cut
        else:
            return last, offset, segment
        last, offset = segment, end
    return last, offset, None


def _text(segment: Segment, decode: Decode) -> str:
    text = segment.text
    if text is None:
        text = segment.text = decode(segment.ids.tolist())
    return text


def _cut(
    segment: Segment, text: str, prompt: str, offset: int, decode: Decode, closing: Closing
) -> int | None:
    """Return how many characters of an answer's text a prompt repeats, if the rest is only how it ended.

    The ids keep the tokens that ended it, so the template must write no more of the answer after them.
    """
    # An answer that was cut off may end within a reasoning or a call, which the template then closes.
    unended = segment.answer if _is_cut_off(segment) else None
    for cut, forbidden in _cuts(segment, text, decode):
        end = offset + cut
        if (
            prompt.startswith(text[:cut], offset)
            and not (forbidden and prompt.startswith(forbidden, end))
            and prompt.startswith(closing(unended, text[:cut]), end)
        ):
            return cut
    return None


def _is_cut_off(segment: Segment) -> bool:
    return segment.finish is Finish.LENGTH


def _cuts(segment: Segment, text: str, decode: Decode) -> list[tuple[int, str]]:
    """Return how much of an answer's text counts as the answer; and what must not follow it in the prompt.

    - The answer ended with a token that the template does not write.
    - It ended with a stop string, which is cut off its message. If the template goes on with the answer's own
      last token, that is not why the rest is missing.
    - It was cut off within a character.
    """
    if segment.answer is None or not segment.ids:
        return []
    if _is_cut_off(segment):
        whole = len(text.rstrip("\ufffd"))
        return [(whole, "")] if whole < len(text) else []
    if segment.finish is not Finish.STOP:
        return []
    ending = decode([segment.ids[-1]])
    cuts = [(len(text) - len(ending), "")] if ending and text.endswith(ending) else []
    content = text_of(segment.answer)
    if isinstance(content, str) and content and not segment.answer.get("tool_calls"):
        start = text.rfind(content)
        if start >= 0:
            cuts.append((start + len(content), ending))
    return cuts


def _common(first: "array[int]", second: "array[int]") -> int:
    """Return how many ids two lists have in common, from the beginning."""
    n = min(len(first), len(second))
    if not n:
        return 0
    (different,) = np.nonzero(np.frombuffer(first, np.int32, n) != np.frombuffer(second, np.int32, n))
    return int(different[0]) if len(different) else n


if array("i").itemsize != 4:
    raise ImportError(f"ids take four bytes, but a C int has {array('i').itemsize} on {sys.platform}")
