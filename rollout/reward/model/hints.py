"""The prompt of an answer with a hint in it, as token ids.

    prompt    ... <|user|> What is it? <|end|> <|assistant|>           as it was sampled from
    with hint ... <|user|> What is it? [hint] <|end|> <|assistant|>    the same ids before and behind the hint

The hint is written behind the last user message. It is put into the ids of the prompt itself, so that the
chat template, the tools and every sampled id before stay exactly as the policy has seen them. Only the tokens
that a hint cuts apart are encoded again.
"""

from collections.abc import Sequence
from typing import Any, cast

from slipstream.rollout.tokenizer import Tokenizer
from slipstream.rollout.trajectory import Messages

HEAD = "\n\n[hint]\n"


class NoPlace(ValueError):
    """The prompt does not show the last user message as it was sent, or there is none."""


def with_hint(tokenizer: Tokenizer, prompt_ids: Sequence[int], messages: Messages, hint: str) -> list[int]:
    """Return the ids of a prompt with a hint behind the last user message of ``messages``. Raises NoPlace."""
    said = _last_words(messages)
    text = tokenizer.decode(list(prompt_ids))
    begin = text.rfind(said)
    if begin < 0:
        raise NoPlace("the prompt does not hold the text of the last user message")
    cut = begin + len(said)
    before, after = _around(tokenizer, prompt_ids, cut)
    pieces = tokenizer.decode(list(prompt_ids[before:after]))
    offset = cut - len(tokenizer.decode(list(prompt_ids[:before])))
    between = f"{pieces[:offset]}{HEAD}{hint.strip()}{pieces[offset:]}"
    return [
        *prompt_ids[:before],
        *tokenizer.encode(between, add_special_tokens=False),
        *prompt_ids[after:],
    ]


def _last_words(messages: Messages) -> str:
    """Return the end of the last user message: its last text. Raises NoPlace."""
    for message in reversed(messages):
        if message.get("role") == "user":
            texts = [text.strip() for text in _texts(message) if text.strip()]
            if texts:
                return texts[-1]
            break
    raise NoPlace("the conversation has no user message with a text")


def _texts(message: dict[str, Any]) -> list[str]:
    content: object = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = cast("list[object]", content) if isinstance(content, list) else []
    texts = (cast("dict[object, object]", part).get("text") for part in parts if isinstance(part, dict))
    return [text for text in texts if isinstance(text, str)]


def _around(tokenizer: Tokenizer, ids: Sequence[int], cut: int) -> tuple[int, int]:
    """Return the range of tokens that hold the place ``cut`` of the text; an empty one between two tokens."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(tokenizer.decode(list(ids[:middle]))) < cut:
            low = middle + 1
        else:
            high = middle
    length = len(tokenizer.decode(list(ids[:low])))
    if length == cut:
        return low, low
    # A token, or the bytes of a character over several tokens, end behind the cut.
    before = low - 1
    whole = tokenizer.decode(list(ids))
    while before > 0 and not whole.startswith(tokenizer.decode(list(ids[:before]))):
        before -= 1
    return before, low
