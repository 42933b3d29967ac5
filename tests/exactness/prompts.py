"""Compares the text of a prompt with what the chat template makes of the client's own history."""

import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from jinja2.exceptions import TemplateError

from tests.exactness.oracle import Asked, Oracle
from tests.exactness.protocols import Message, Request


class PromptCheck:
    """Known answers count as they were given, what the gateway does not know as it was sent.

    Blanks around answers do not count.
    """

    def __init__(self, tokenizer: Any, oracle: Oracle) -> None:
        self._tokenizer = tokenizer
        self._oracle = oracle

    def check(
        self, asked: Asked, request: Request, history: Sequence[Message], known: Sequence[Message]
    ) -> None:
        """Look at the prompt that an engine was given for a request.

        ``known``: all messages that the client has in any history.
        """
        records = self._oracle.records.asked_by(asked.number)
        if not records or _is_ambiguous(history, known) or _are_mixed(history, request.messages):
            return
        if request.previous is not None and any(map(_says_nothing, history)):
            return  # there is no item for an answer that says nothing
        allowed = {self._rendered(history, request), self._rendered(request.messages, request)}
        text = self._tokenizer.decode(list(records[0].prompt))
        if _without_blanks(text) not in map(_without_blanks, allowed):
            example = " or ".join(_difference(text, other) for other in allowed)
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


def _is_ambiguous(history: Sequence[Message], known: Sequence[Message]) -> bool:
    """Return whether another answer says the same as one in a history, after another reasoning, with other
    ids of its calls, or with another order of their arguments.
    """
    forms: dict[str, set[str]] = {}
    for message in (*known, *history):
        if message["role"] == "assistant":
            form = json.dumps([message.get("reasoning_content", ""), message.get("tool_calls")])
            forms.setdefault(_said(message), set()).add(form)
    return any(len(forms[_said(m)]) > 1 for m in history if m["role"] == "assistant")


def _said(message: Message) -> str:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [[function["name"], _as_object(function["arguments"])] for function in functions]
    return json.dumps([message["content"].strip(), calls], sort_keys=True)


def _says_nothing(message: Message) -> bool:
    parts = (message["content"], message.get("tool_calls"), message.get("reasoning_content"))
    return message["role"] == "assistant" and not any(parts)


def _are_mixed(history: Sequence[Message], sent: Sequence[Message]) -> bool:
    """Return whether some reasoning was left out, and some was not."""
    thought = [message for message in history if message.get("reasoning_content")]
    return len(thought) > 1 and 0 < sum("reasoning_content" in message for message in sent) < len(thought)


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _difference(text: str, other: str) -> str:
    """Return where two texts differ."""
    pairs = enumerate(zip(text, other, strict=False))
    place = next((place for place, (a, b) in pairs if a != b), min(len(text), len(other)))
    around = slice(max(0, place - 40), place + 80)
    return f"{text[around]!r} is not {other[around]!r}"
