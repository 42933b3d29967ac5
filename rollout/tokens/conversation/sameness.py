"""Digests that are equal for equal messages, and for equal beginnings of conversations.

Two messages are the same if their role, text and tool calls are. Calls are compared as JSON values. Ids,
the order of keys, reasoning (in its field, or before the text in ``<think>``), names and settings of caches
do not count, nor do an answer's blanks, fences of code, parts and ways to write a letter in Unicode: clients
change or drop them when they send a message again.
``developer`` is another word for ``system``, and ``function`` for ``tool``. One part of text is the same as
the text itself.
"""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, cast
from unicodedata import normalize

ROLES = {"developer": "system", "function": "tool"}
"""Other words for roles."""

_TEXT = frozenset({"text", "input_text", "output_text", "refusal"})
_REASONING = frozenset({"thinking", "redacted_thinking", "reasoning"})
_PASSING = frozenset({"id", "cache_control", "citations", "annotations", "logprobs"})
"""Keys of a part that do not say what the message is."""


class Mark(NamedTuple):
    """Digests of one message of a conversation."""

    alone: bytes
    """Equal for equal messages."""
    history: bytes
    """Equal if the message and all messages before it are equal."""


def role_of(message: Mapping[str, object]) -> str:
    """Return the role of a message, by its one name."""
    role = message.get("role")
    return ROLES.get(role, role) if isinstance(role, str) else ""


def digest_alone(message: Mapping[str, object]) -> bytes:
    """Return a digest that is equal for equal messages. Raises ValueError for JSON nested too deeply."""
    role = role_of(message).encode("utf-8", "replace")
    text = text_of(message)
    if role == b"assistant" and _is_text(text):
        text = _letters(message)
    calls = functions_of(message)
    if isinstance(text, str) and not calls:
        return blake2b(b"%b\0%b" % (role, text.encode("utf-8", "replace")), digest_size=16).digest()
    try:
        value = json.dumps([text, calls], sort_keys=True).encode()
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    return blake2b(b"%b\1%b" % (role, value), digest_size=16).digest()


def marks_of(messages: Sequence[Mapping[str, object]], before: bytes = b"") -> list[Mark]:
    """Return the digests of messages that follow the history ``before``."""
    marks: list[Mark] = []
    for message in messages:
        alone = digest_alone(message)
        before = blake2b(before + alone, digest_size=16).digest()
        marks.append(Mark(alone, before))
    return marks


def text_of(message: Mapping[str, object]) -> str | list[object]:
    """Return the text of a message; a list if it has several parts, or parts other than text."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else [_plain(content)]
    parts: list[object] = []
    for part in cast("list[object]", content):
        if not isinstance(part, dict):
            parts.append(part)
            continue
        fields = cast("dict[str, object]", part)
        kind = fields.get("type")
        if kind in _TEXT:
            parts.append(fields.get("text", fields.get("refusal", "")))
        elif kind not in _REASONING:
            parts.append(_plain({key: value for key, value in fields.items() if key not in _PASSING}))
    if not parts:
        return ""
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts


def is_rewritten(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """True if one message is the other one, but for what agents add to a message and take out of it again:
    blocks in tags such as ``<system-reminder>``, text before or after, blanks, and pictures.
    """
    if role_of(one) != role_of(other):
        return False
    said = [_words(message) for message in (one, other)]
    if not any(said):  # blocks in tags are all that they have, such as a result in XML
        said = [" ".join(_spoken(message).split()) for message in (one, other)]
    short, long = sorted(said, key=len)
    if not long:
        blank = all(_is_text(text_of(message)) for message in (one, other))
        return blank or digest_alone(one) == digest_alone(other)
    if not short:
        return False
    if short == long:
        return True
    begins_or_ends = long.startswith(f"{short} ") or long.endswith(f" {short}")
    return begins_or_ends or (len(short) >= _TELLING and short in long)


def is_answer(answer: Mapping[str, object], repeated: Mapping[str, object]) -> bool:
    """True if a repeated answer makes the same calls as another one, and one of them holds the other whole:
    agents write names before answers and notes after them, and leave out the text beside calls.
    """
    functions = functions_of(answer)
    if functions != functions_of(repeated) or not all(_is_text(text_of(m)) for m in (answer, repeated)):
        return False
    said = _letters(repeated)
    short, long = sorted((_letters(answer), said), key=len)
    return bool(functions and not said) or (len(short) >= _TELLING and short in long)


def reasoning_of(message: Mapping[str, object]) -> str:
    """Return the reasoning of an answer, from its field or from the beginning of its text."""
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning.strip():
        return reasoning.strip()
    text = text_of(message)
    thought = _THOUGHT.match(text) if isinstance(text, str) else None
    return thought[2].strip() if thought else ""


def is_reminder(message: Mapping[str, object]) -> bool:
    """True for a message of blocks in tags alone: agents put such messages in and take them out again."""
    if role_of(message) not in ("user", "system") or not _is_text(text_of(message)):
        return False
    text = _spoken(message)
    return text.lstrip().startswith("<") and not _bare(text)


def is_step(message: Mapping[str, object]) -> bool:
    """True for a tool call or its result: agents may leave out those that have led to an answer."""
    return role_of(message) == "tool" or bool(message.get("tool_calls") or message.get("function_call"))


def digest_of_exchange(before: Mapping[str, object], alone: bytes) -> bytes:
    """Return a digest of an answer and the message before it, up to blocks in tags and blanks.

    ``alone``: digest of the answer.
    """
    text = _words(before)
    said = digest_alone({**before, "content": text} if text else before)
    return blake2b(said + alone, digest_size=16).digest()


_TELLING = 16
"""Characters of a text that hardly stands in another one by chance."""

_THOUGHT = re.compile(r"\s*<(think|thinking)>(.*?)</\1>", re.DOTALL)

_FENCE = re.compile(r"```\w*")

_PICTURE = re.compile(
    r"\s*\[[^\[\]\n]*\b(image|picture|screenshot|document|audio|video)\b[^\[\]\n]*\]\s*", re.IGNORECASE
)

_BLOCK = re.compile(r"<([A-Za-z][\w-]{0,40})>.*?</\1>", re.DOTALL)


def _bare(text: str) -> str:
    """Return a text without blocks in tags, its words separated by one blank each."""
    return normalize("NFC", " ".join(_BLOCK.sub(" ", text).split()))


def _words(message: Mapping[str, object]) -> str:
    """Return the words of a message, without parts that are the mark of a picture or a note in its place."""
    text = text_of(message)
    parts = [text] if isinstance(text, str) else [part for part in text if isinstance(part, str)]
    return _bare("\n".join([part for part in parts if not _PICTURE.fullmatch(part)] or parts))


def _spoken(message: Mapping[str, object], between: str = "\n") -> str:
    """Return the text of all parts of a message that are text."""
    text = text_of(message)
    return text if isinstance(text, str) else between.join(part for part in text if isinstance(part, str))


def _letters(answer: Mapping[str, object]) -> str:
    """Return the text of an answer without reasoning, blanks and fences of code."""
    text = _spoken(answer, "")
    thought = _THOUGHT.match(text)
    text = _FENCE.sub("", text[thought.end() if thought else 0 :])
    return normalize("NFC", "".join(text.split()))


def _is_text(text: str | list[object]) -> bool:
    return isinstance(text, str) or all(isinstance(part, str) for part in text)


def results_of(message: Mapping[str, object]) -> str | None:
    """Return the id of the tool call whose result a message is; None: it is none, or names none."""
    id_ = message.get("tool_call_id")
    return id_ if role_of(message) == "tool" and isinstance(id_, str) and id_ else None


def ids_of_calls(message: Mapping[str, object]) -> list[object]:
    """Return the ids of the tool calls of a message."""
    calls = message.get("tool_calls")
    items = cast("list[object]", calls) if isinstance(calls, list) else []
    return [cast("dict[str, object]", call).get("id") for call in items if isinstance(call, dict)]


def functions_of(message: Mapping[str, object]) -> list[object]:
    """Return (name, arguments as a JSON value) of each tool call."""
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        functions = [
            cast("dict[str, object]", call).get("function")
            for call in cast("list[object]", calls)
            if isinstance(call, dict)
        ]
    else:
        functions = [message.get("function_call")]
    return [_call(cast("dict[str, object]", item)) for item in functions if isinstance(item, dict)]


def _call(function: dict[str, object]) -> list[object]:
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return [function.get("name"), {}]
    if isinstance(arguments, str):
        try:
            arguments = _plain(json.loads(arguments))
        except (ValueError, RecursionError):
            return [function.get("name"), arguments, "no JSON"]
    else:
        arguments = _plain(arguments)
    return [function.get("name"), arguments]


def _plain(value: object) -> object:
    """Return a JSON value in which 1.0 is 1, as JavaScript writes it."""
    try:
        return _without_integral_floats(value)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None


def _without_integral_floats(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_without_integral_floats(item) for item in cast("list[object]", value)]
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return {key: _without_integral_floats(item) for key, item in items}
    return value
