"""Compares the text of a prompt with what the chat template makes of the client's own history.

A message is the same message wherever role, text and calls (as JSON values) are, behind the same messages;
what clients leave out or change when they repeat it are its forms. The template is given

- an answer of the same session behind the same messages as it was answered, whatever the client repeats;
- any other answer, for example behind a question that was rewritten, or in a session that began when one
  was, in a form in which it was sent there, or in which an equal answer was given.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import islice, product
from typing import Any

from jinja2.exceptions import TemplateError

from tests.exactness.oracle import ROLES, Asked, Oracle, text_of
from tests.exactness.protocols import Message, Request

MOST_RENDERED = 500
"""Combinations of forms that are tried. Where there are more, a prompt is not checked."""


class PromptCheck:
    """All forms of the messages of one client. Blanks around answers do not count."""

    def __init__(self, tokenizer: Any, oracle: Oracle) -> None:
        self._tokenizer = tokenizer
        self._oracle = oracle
        self._sent: dict[str, list[Message]] = defaultdict(list)
        """By their histories."""
        self._answered: dict[tuple[str | None, str], list[Message]] = defaultdict(list)
        """By sessions and histories."""
        self._answers: dict[str, list[Message]] = defaultdict(list)
        """By what they say."""
        self._odd: set[tuple[str | None, str]] = set()
        """Sessions and histories with answers that have ended in a way that their texts do not show."""

    def sent(self, messages: Sequence[Message]) -> None:
        """Note the forms of the messages of a request."""
        for message, history in zip(messages, _histories(messages), strict=True):
            _add(self._sent[history], message)

    def answered(self, asked: Asked, messages: Sequence[Message], *, is_odd: bool) -> None:
        """Note the last of these messages, which is the answer to a request.

        ``is_odd``: its ids may stand for more than its text.
        """
        *_, history = _histories(messages)
        if is_odd:
            self._odd.add((asked.session, history))
        _add(self._answered[asked.session, history], messages[-1])
        _add(self._answers[_said(messages[-1])], messages[-1])

    def check(self, asked: Asked, request: Request, history: Sequence[Message]) -> None:
        """Look at the prompt that an engine was given for a request, before its answer is noted.

        ``history``: its messages as the client knows them.
        """
        records = self._oracle.records.asked_by(asked.number)
        if not records or any(_says_nothing(message) or _breaks_off(message) for message in history):
            return
        if any((asked.session, said) in self._odd for said in _histories(history)):
            return
        forms = [
            self._answered.get((asked.session, key)) or self._sent[key] + self._answers[_said(known)]
            for known, key in zip(history, _histories(history), strict=True)
        ]
        text = self._tokenizer.decode(list(records[0].prompt))
        others: list[str] = []
        for messages in islice(product(*forms), MOST_RENDERED):
            other = self._rendered(messages, request)
            if _without_blanks(text) == _without_blanks(other):
                return
            others.append(other)
        if len(others) < MOST_RENDERED:
            example = " or ".join(_difference(text, other) for other in others[:4])
            self._oracle.findings.wrong("wrong_prompts", f"{asked.number}: {example}")

    def _rendered(self, messages: Sequence[Message], request: Request) -> str:
        from sglang.srt.entrypoints.openai.protocol import Tool

        try:
            return self._tokenizer.apply_chat_template(
                [_as_the_template_reads(message) for message in messages],
                tools=[Tool(**tool).model_dump() for tool in request.tools or ()] or None,
                add_generation_prompt=True,
                tokenize=False,
                **request.more.get("chat_template_kwargs", {}),
            )
        except TemplateError as error:
            return f"refused: {error}"


def _as_the_template_reads(message: Message) -> Message:
    read = deepcopy(message)
    if read["role"] == "developer":
        read["role"] = "system"
    content = read.get("content") or ""
    read["content"] = content if isinstance(content, str) else "".join(part["text"] for part in content)
    for call in read.get("tool_calls") or ():
        call["function"]["arguments"] = _as_object(call["function"]["arguments"])
    return read


def _as_object(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def _histories(messages: Sequence[Message]) -> Iterator[str]:
    """Return for each message what it and all messages before it say."""
    history = ""
    for message in messages:
        history += _said(message)
        yield history


def _said(message: Message) -> str:
    """Return what is equal in all forms of a message."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [[function["name"], _plain(_as_object(function["arguments"]))] for function in functions]
    role = message["role"]
    text = text_of(message)
    said = text.strip() if role == "assistant" else text
    return json.dumps([ROLES.get(role, role), said, calls], sort_keys=True)


def _plain(value: Any) -> Any:
    """Return a JSON value in which 2.0 is 2."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _add(forms: list[Message], message: Message) -> None:
    if message not in forms:
        forms.append(message)


def _says_nothing(message: Message) -> bool:
    """Return whether an answer has no parts: /v1/responses and /v1/messages leave it out."""
    parts = (message["content"], message.get("tool_calls"), message.get("reasoning_content"))
    return message["role"] == "assistant" and not any(parts)


def _breaks_off(message: Message) -> bool:
    """Return whether an answer has a call that is no JSON: how much of it a client gets depends on chunks."""
    arguments = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    return any(isinstance(_as_object(text), str) for text in arguments)


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _difference(text: str, other: str) -> str:
    """Return where two texts differ."""
    pairs = enumerate(zip(text, other, strict=False))
    place = next((place for place, (a, b) in pairs if a != b), min(len(text), len(other)))
    around = slice(max(0, place - 40), place + 80)
    return f"{text[around]!r} is not {other[around]!r}"
