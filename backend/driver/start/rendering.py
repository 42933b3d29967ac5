"""Checks that a chat template writes all texts of a chat, and nothing that depends on them.

    the chat ──► template ──► every text is there, as it is, trimmed, or as JSON
    the same chat with a word in place of each text ──► template ──► words replaced by the texts: equal

A template that cannot read the content writes an empty message, or its Python representation.
"""

import json
import re
from collections.abc import Iterator

from slipstream.rollout.tokens.tokenizer import END_OF_REASONING, HfTokenizer
from slipstream.rollout.tokens.trajectory import Messages

CONDITIONAL = re.compile(r"/(?:no_)?think\b|</?think>|</?tool_response>|detailed thinking o(?:n|ff)")
"""Words in texts by which templates decide what they write: they may drop them, and earlier reasoning."""


ASKING = ("system", "developer", "user")
"""Roles whose texts templates write as they are. They take apart those of answers and of tools."""


def text_problem(tokenizer: HfTokenizer, messages: Messages) -> str | None:
    """Return which text of a chat its template does not write, or what it writes that nobody wrote.

    Raises whatever the template raises.
    """
    written = _rendered(tokenizer, messages)
    for place, text in _texts(messages):
        if not any(form in written for form in _forms(text)):
            return (
                f"`prompt`, message {place}: the chat template does not write its text {text[:60]!r}; "
                "expected a template that writes every text of a chat: write the text into another message, "
                "or change the template (tokenizer_config.json or chat_template.jinja)"
            )
    return _addition(tokenizer, messages, written)


def _rendered(tokenizer: HfTokenizer, messages: Messages) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _texts(messages: Messages) -> Iterator[tuple[int, str]]:
    """Yield texts that must be written, with the number of their message."""
    for place, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str):
            said = content.rpartition(END_OF_REASONING)[2] if message["role"] == "assistant" else content
            yield from ((place, part) for part in CONDITIONAL.split(said) if part.strip())
        for call in message.get("tool_calls") or ():
            function = call.get("function", call) if isinstance(call, dict) else {}
            if isinstance(name := function.get("name"), str):
                yield place, name


def _forms(text: str) -> Iterator[str]:
    stripped = text.strip()
    yield stripped
    yield json.dumps(stripped, ensure_ascii=False)[1:-1]
    yield json.dumps(stripped)[1:-1]


def _addition(tokenizer: HfTokenizer, messages: Messages, written: str) -> str | None:
    """Return what the template writes because of the texts, beside them."""
    texts = [str(message.get("content")) for message in messages]
    if any(message["role"] not in ASKING for message in messages) or any(map(CONDITIONAL.search, texts)):
        return None
    words = [f"word{place}of{len(texts)}" if text.strip() else text for place, text in enumerate(texts)]
    pairs = list(zip(messages, words, strict=True))
    expected = _rendered(tokenizer, [{**message, "content": word} for message, word in pairs])
    for word, text in zip(words, texts, strict=True):
        expected = expected.replace(word, text) if text.strip() else expected
    found, expected = _bare(written), _bare(expected)
    if found == expected:
        return None
    place = shared_length(found, expected)
    return (
        f"`prompt`: the chat template writes {found[max(0, place - 10) : place + 40]!r} because of its "
        f"texts, and {expected[max(0, place - 10) : place + 40]!r} with the same texts put in place of "
        "others; expected the same: change the chat or the template (chat_template.jinja)"
    )


def shared_length(one: str, other: str) -> int:
    """Return the number of characters with which two texts begin alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _bare(text: str) -> str:
    """Return a text without what trimming and JSON change: blanks, line ends, backslashes."""
    return "".join(text.replace("\\n", "").split()).replace("\\", "")
