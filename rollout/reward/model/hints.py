"""The prompt of an answer with a hint in it, as token ids.

    prompt    ... <|user|> What is it? <|end|> <|assistant|>           as it was sampled from
    with hint ... <|user|> What is it? [hint] <|end|> <|assistant|>    the same ids before and after the hint

The hint is written at the end of the last user message. It is put into the ids of the prompt itself, so that
the chat template, the tools and every sampled id before stay exactly as the policy has seen them. Only the
tokens that a hint cuts apart are encoded again. To find the place, the words of the message are searched
together with the text that the chat template writes after them: the words alone may occur once more, for
example in the output of a tool.
"""

import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.tokens.trajectory import Messages

HEAD = "\n\n[hint]\n"

MARK = "\x02hint\x03"
"""Stands for the hint when a chat template is asked which text follows it. Nobody writes it."""


class NoPlace(ValueError):
    """The prompt does not show the last user message as it was sent, or there is none."""


def with_hint(tokenizer: Tokenizer, prompt_ids: Sequence[int], messages: Messages, hint: str) -> list[int]:
    """Return the ids of a prompt with a hint after the last user message of ``messages``. Raises NoPlace."""
    text = _text(tokenizer, prompt_ids)
    cut = _place(tokenizer, text, messages)
    before, after = _around(tokenizer, prompt_ids, text, cut)
    cut_apart = _text(tokenizer, prompt_ids[before:after])
    offset = cut - len(_text(tokenizer, prompt_ids[:before]))
    between = f"{cut_apart[:offset]}{HEAD}{hint.strip()}{cut_apart[offset:]}"
    return [
        *prompt_ids[:before],
        *tokenizer.encode(between, add_special_tokens=False),
        *prompt_ids[after:],
    ]


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _place(tokenizer: Tokenizer, text: str, messages: Messages) -> int:
    """Return the end of the last user message in the text of a prompt. Raises NoPlace."""
    last = _from_last_user(messages)
    flat = [{**message, "content": "\n".join(_texts(message))} for message in last]
    said = [words.strip() for words in _texts(last[0]) if words.strip()]
    if not said:
        raise NoPlace("the last user message has no text")
    words = _as_tokenized(tokenizer, said[-1])
    # The prompt may end otherwise than the template writes it by default, for example because a client has
    # asked for reasoning. An answer after the message may be rendered otherwise than it was sampled: then
    # only the end of the message itself is compared.
    for shape, is_answered in itertools.product((last, flat, last[:1], flat[:1]), (True, False)):
        tail = _tail(tokenizer, shape, is_answered)
        if tail is not None and (begin := text.rfind(words + _as_tokenized(tokenizer, tail))) >= 0:
            return begin + len(words)
    raise NoPlace("the prompt does not show the last user message as it was sent")


def _from_last_user(messages: Messages) -> Messages:
    """Return the last user message and all after it, as chat templates expect them. Raises NoPlace."""
    for place in range(len(messages) - 1, -1, -1):
        if messages[place].get("role") == "user":
            return [_for_template(message) for message in messages[place:]]
    raise NoPlace("the conversation has no user message")


def _for_template(message: Mapping[str, Any]) -> dict[str, object]:
    """Return a message with the arguments of its tool calls as objects: a request holds them as JSON."""
    calls = copy.deepcopy(message.get("tool_calls") or [])
    for call in calls:
        with suppress(ValueError, TypeError, LookupError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return {**message, "content": message.get("content") or "", **({"tool_calls": calls} if calls else {})}


def _as_tokenized(tokenizer: Tokenizer, text: str) -> str:
    """Return a text as its tokens have it: tokenizers may change letters."""
    return _text(tokenizer, tokenizer.encode(text, add_special_tokens=False)) if text else ""


def _tail(tokenizer: Tokenizer, messages: Messages, is_answered: bool) -> str | None:
    """Return the text that the chat template writes after that of the first message; None: it refuses.

    ``is_answered``: the last message is followed by the beginning of an answer.
    """
    try:
        rendered: str = tokenizer.apply_chat_template(
            [_marked(messages[0]), *messages[1:]], tokenize=False, add_generation_prompt=is_answered
        )
    except Exception:  # a template refuses messages that it does not expect, each in its own way
        return None
    _, mark, tail = rendered.rpartition(MARK)
    return tail if mark else None


def _marked(message: Mapping[str, object]) -> dict[str, object]:
    """Return a message whose last text ends with ``MARK``."""
    content: object = message["content"]
    if isinstance(content, str):
        return {**message, "content": content.rstrip() + MARK}
    items = cast("list[object]", content)
    parts = [dict(cast("dict[str, Any]", item)) for item in items if isinstance(item, dict)]
    for part in reversed(parts):
        if isinstance(part.get("text"), str) and part["text"].strip():
            part["text"] = part["text"].rstrip() + MARK
            break
    return {**message, "content": parts}


def _texts(message: Mapping[str, object]) -> list[str]:
    content: object = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = cast("list[object]", content) if isinstance(content, list) else []
    texts = (cast("dict[object, object]", part).get("text") for part in parts if isinstance(part, dict))
    return [text for text in texts if isinstance(text, str)]


def _around(tokenizer: Tokenizer, ids: Sequence[int], text: str, cut: int) -> tuple[int, int]:
    """Return the range of tokens that hold the place ``cut`` of a text; an empty one between two tokens.

    ``text``: of all ``ids``.
    """
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(_text(tokenizer, ids[:middle])) < cut:
            low = middle + 1
        else:
            high = middle
    if _text(tokenizer, ids[:low]) == text[:cut]:
        return low, low
    # A token reaches beyond the cut, or a character is spread over several tokens.
    before = max(0, low - 1)
    while before > 0 and not text.startswith(_text(tokenizer, ids[:before])):
        before -= 1
    after = low
    while after < len(ids) and not text.startswith(_text(tokenizer, ids[:after])):
        after += 1
    return before, after
