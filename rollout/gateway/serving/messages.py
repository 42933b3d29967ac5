"""The message that a client has got, put together from what was sent to it. Pure.

Sessions recognize an answer when the client repeats it, so that it has to be known as it was sent: the
streaming parsers of tool calls and reasoning do not always split a text as the others do.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.rollout.gateway.conversations import ChatMessage


def as_template_reads(message: Mapping[str, Any]) -> ChatMessage:
    """Return an assistant's message of OpenAI's chat protocol as the chat template reads it.

    The blanks before a call are the template's own, as SGLang has it when it does not stream.
    """
    read: ChatMessage = {"role": "assistant", "content": message.get("content") or ""}
    if reasoning := message.get("reasoning_content"):
        read["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        read["content"] = read["content"].strip()
        read["tool_calls"] = [_call(call) for call in calls]
    return read


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        """The policy has written what is no JSON: the client gets it as it is, and may repeat it."""
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


class StreamedMessages:
    """Collects the messages of a chat completion from the chunks of its stream."""

    def __init__(self, choices: int) -> None:
        self._content: list[list[str]] = [[] for _ in range(choices)]
        self._reasoning: list[list[str]] = [[] for _ in range(choices)]
        self._calls: list[dict[int, dict[str, Any]]] = [{} for _ in range(choices)]

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Add a chunk in OpenAI's form."""
        for choice in chunk.get("choices") or ():
            index, delta = choice["index"], choice.get("delta") or {}
            if text := delta.get("content"):
                self._content[index].append(text)
            if text := delta.get("reasoning_content"):
                self._reasoning[index].append(text)
            for part in delta.get("tool_calls") or ():
                self._add_call(self._calls[index], part)

    def _add_call(self, calls: dict[int, dict[str, Any]], part: Mapping[str, Any]) -> None:
        function = part.get("function") or {}
        call = calls.setdefault(part["index"], {"id": None, "function": {"name": None, "arguments": ""}})
        call["id"] = call["id"] or part.get("id")
        call["function"]["name"] = call["function"]["name"] or function.get("name")
        call["function"]["arguments"] += function.get("arguments") or ""

    def messages(self) -> Sequence[ChatMessage]:
        """Return the message of each choice."""
        return [
            as_template_reads(
                {
                    "content": "".join(content),
                    "reasoning_content": "".join(reasoning),
                    "tool_calls": [calls[index] for index in sorted(calls)],
                }
            )
            for content, reasoning, calls in zip(self._content, self._reasoning, self._calls, strict=True)
        ]
