"""The protocols of the gateway, as their clients speak them.

A conversation is kept in one form, OpenAI's chat messages, whichever protocol its next request uses: clients
do change it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.exactness.asgi import events_of

Message = dict[str, Any]


@dataclass
class Request:
    """A request of a client, before it is written in a protocol."""

    messages: list[Message] = field(default_factory=list[Message])
    prompt: Any = None
    """Text, or ids, or several of either, where there are no messages."""
    tools: list[dict[str, Any]] | None = None
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    """Names as in OpenAI's chat protocol."""
    stream: bool = False
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of the body."""
    previous: tuple[str, int] | None = None
    """A response, and the number of messages up to its end: the request goes on behind it."""


@dataclass
class Answered:
    """A reply as its client has read it."""

    messages: list[Message]
    """One for each choice."""
    response: str | None = None
    raw: Any = None


@dataclass(frozen=True)
class Protocol:
    """One endpoint."""

    name: str
    path: str
    body: Callable[[Request], dict[str, Any]]
    read: Callable[[bytes], Answered]
    read_stream: Callable[[str], Answered]
    text_of_part: Callable[[str], str]
    """Returns the text of an answer that a part of a stream brings."""


def _assistant(content: str, reasoning: str = "", calls: Sequence[Message] = ()) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def _call(id_: str, name: str, arguments: str) -> Message:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


# ---- /v1/chat/completions


def _chat_body(request: Request) -> dict[str, Any]:
    body = {"messages": request.messages, "stream": request.stream, **request.sampling, **request.more}
    return body | ({"tools": request.tools} if request.tools else {})


def _read_chat(raw: bytes) -> Answered:
    reply = json.loads(raw)
    messages = [
        _assistant(
            choice["message"].get("content") or "",
            choice["message"].get("reasoning_content") or "",
            [
                _call(call["id"], call["function"]["name"], call["function"]["arguments"])
                for call in choice["message"].get("tool_calls") or ()
            ],
        )
        for choice in reply["choices"]
    ]
    return Answered(messages, raw=reply)


def _read_chat_stream(text: str) -> Answered:
    collected: dict[int, tuple[list[str], list[str], dict[int, list[str]]]] = {}
    events = events_of(text)
    for event in events:
        for choice in event.get("choices") or ():
            content, reasoning, calls = collected.setdefault(choice["index"], ([], [], {}))
            delta = choice["delta"]
            content.append(delta.get("content") or "")
            reasoning.append(delta.get("reasoning_content") or "")
            for part in delta.get("tool_calls") or ():
                function = part.get("function") or {}
                call = calls.setdefault(part["index"], ["", "", ""])
                call[0] = call[0] or part.get("id") or ""
                call[1] = call[1] or function.get("name") or ""
                call[2] += function.get("arguments") or ""
    messages = [
        _assistant("".join(content), "".join(reasoning), [_call(*calls[place]) for place in sorted(calls)])
        for _, (content, reasoning, calls) in sorted(collected.items())
    ]
    return Answered(messages, raw=events)


def _chat_part(part: str) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for event in events_of(part)
        for choice in event.get("choices") or ()
        if choice["index"] == 0
    )


# ---- /v1/messages


def _anthropic_body(request: Request) -> dict[str, Any]:
    system: list[Message] = []
    messages: list[Message] = []
    for message in request.messages:
        role, content = message["role"], message.get("content")
        blocks = (
            [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
        )
        if role in ("system", "developer"):
            system += [block | {"cache_control": {"type": "ephemeral"}} for block in blocks]
            continue
        if role == "assistant":
            if message.get("reasoning_content"):
                thinking = {"type": "thinking", "thinking": message["reasoning_content"], "signature": "s"}
                blocks = [thinking, *blocks]
            blocks = blocks + [
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": json.loads(call["function"]["arguments"]),
                }
                for call in message.get("tool_calls") or ()
            ]
        elif role == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}]
            role = "user"
        if message["role"] == "tool" and messages and _has_results(messages[-1]):
            messages[-1]["content"] += blocks  # parallel calls have one message of results
            continue
        messages.append({"role": role, "content": blocks or ""})
    sampling = dict(request.sampling)
    body: dict[str, Any] = {
        "model": "claude",
        "max_tokens": sampling.pop("max_tokens", 400),
        "messages": messages,
        "stream": request.stream,
        "metadata": {"user_id": "u"},
        **{name: sampling[name] for name in ("temperature", "top_p", "top_k") if name in sampling},
    }
    if "stop" in sampling:
        body["stop_sequences"] = [sampling["stop"]] if isinstance(sampling["stop"], str) else sampling["stop"]
    if system:
        body["system"] = system
    if request.tools:
        body["tools"] = [
            {
                "name": tool["function"]["name"],
                "description": tool["function"]["description"],
                "input_schema": tool["function"]["parameters"],
            }
            for tool in request.tools
        ]
    return body | {name: value for name, value in request.more.items() if name in SESSION}


def _has_results(message: Message) -> bool:
    content = message["content"]
    return message["role"] == "user" and bool(content) and content[-1]["type"] == "tool_result"


SESSION = ("session_id", "turn_type", "session_done")


def _read_blocks(blocks: Sequence[Message]) -> Message:
    return _assistant(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        [
            _call(block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))
            for block in blocks
            if block["type"] == "tool_use"
        ],
    )


def _read_anthropic(raw: bytes) -> Answered:
    reply = json.loads(raw)
    return Answered([_read_blocks(reply["content"])], raw=reply)


def _read_anthropic_stream(text: str) -> Answered:
    blocks: dict[int, Message] = {}
    for event in events_of(text):
        if event["type"] == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"]) | {"json": ""}
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for kind, name in (("text_delta", "text"), ("thinking_delta", "thinking")):
                if delta["type"] == kind:
                    block[name] += delta[name]
            if delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
    for block in blocks.values():
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"] or "{}")
    return Answered([_read_blocks([blocks[place] for place in sorted(blocks)])])


def _anthropic_part(part: str) -> str:
    return "".join(
        event["delta"].get("text", "") for event in events_of(part) if event["type"] == "content_block_delta"
    )


# ---- /v1/responses


def _items(message: Message) -> list[Message]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": content}]
    if role != "assistant":
        return [{"role": role, "content": content}]
    items: list[Message] = []
    if message.get("reasoning_content"):
        text = {"type": "reasoning_text", "text": message["reasoning_content"]}
        items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [text]})
    if content or not message.get("tool_calls"):
        whole = content if isinstance(content, str) else "".join(part["text"] for part in content or ())
        text = {"type": "output_text", "text": whole, "annotations": []}
        items.append(
            {"type": "message", "role": "assistant", "status": "completed", "id": "m", "content": [text]}
        )
    return items + [
        {
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
        }
        for call in message.get("tool_calls") or ()
    ]


def _responses_body(request: Request) -> dict[str, Any]:
    messages, more = request.messages, {}
    if request.previous is not None:
        response, known = request.previous
        messages, more = messages[known:], {"previous_response_id": response}
    sampling = dict(request.sampling)
    if "max_tokens" in sampling:
        more["max_output_tokens"] = sampling.pop("max_tokens")
    names = ("temperature", "top_p", "top_k", "stop")
    body: dict[str, Any] = {
        "input": [item for message in messages for item in _items(message)],
        "stream": request.stream,
        **{name: sampling[name] for name in names if name in sampling},
        **more,
    }
    if request.tools:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in request.tools]
    return body | {name: value for name, value in request.more.items() if name in SESSION}


def _read_response(response: Mapping[str, Any]) -> Answered:
    content, reasoning, calls = "", "", []
    for item in response["output"]:
        if item["type"] == "message":
            content += "".join(part["text"] for part in item["content"])
        elif item["type"] == "reasoning":
            reasoning += "".join(part["text"] for part in item.get("content") or ())
        elif item["type"] == "function_call":
            calls.append(_call(item["call_id"], item["name"], item["arguments"]))
    return Answered([_assistant(content, reasoning, calls)], response["id"], response)


def _read_responses(raw: bytes) -> Answered:
    return _read_response(json.loads(raw))


def _read_responses_stream(text: str) -> Answered:
    for event in reversed(events_of(text)):
        if event.get("type") in ("response.completed", "response.incomplete"):
            return _read_response(event["response"])
    return Answered([])


def _responses_part(part: str) -> str:
    events = (event for event in events_of(part) if event.get("type") == "response.output_text.delta")
    return "".join(event["delta"] for event in events)


# ---- /v1/completions and /generate


def _completion_body(request: Request) -> dict[str, Any]:
    return {"prompt": request.prompt, "stream": request.stream, **request.sampling, **request.more}


def _read_completion(raw: bytes) -> Answered:
    reply = json.loads(raw)
    return Answered([_assistant(choice["text"]) for choice in reply["choices"]], raw=reply)


def _read_completion_stream(text: str) -> Answered:
    texts: dict[int, str] = {}
    for event in events_of(text):
        for choice in event.get("choices") or ():
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return Answered([_assistant(texts[index]) for index in sorted(texts)])


_NATIVE = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}


def _generate_body(request: Request) -> dict[str, Any]:
    prompt = request.prompt
    first = prompt[0] if isinstance(prompt, list) else prompt
    is_ids = isinstance(first, int | list)
    more = {name: value for name, value in request.more.items() if name in SESSION}
    return {
        "input_ids" if is_ids else "text": prompt,
        "sampling_params": {_NATIVE.get(name, name): value for name, value in request.sampling.items()},
        "return_logprob": True,
        "stream": request.stream,
        **more,
    }


def _read_generated(raw: bytes) -> Answered:
    reply = json.loads(raw)
    parts = reply if isinstance(reply, list) else [reply]
    return Answered([_assistant(part["text"]) for part in parts], raw=parts)


def _read_generated_stream(text: str) -> Answered:
    parts: dict[int, Message] = {}
    for event in events_of(text):
        parts[event.get("index", 0)] = event
    whole = [parts[index] for index in sorted(parts)]
    return Answered([_assistant(part["text"]) for part in whole], raw=whole)


CHAT = Protocol("chat", "/v1/chat/completions", _chat_body, _read_chat, _read_chat_stream, _chat_part)
ANTHROPIC = Protocol(
    "messages", "/v1/messages", _anthropic_body, _read_anthropic, _read_anthropic_stream, _anthropic_part
)
RESPONSES = Protocol(
    "responses", "/v1/responses", _responses_body, _read_responses, _read_responses_stream, _responses_part
)
COMPLETION = Protocol(
    "completions",
    "/v1/completions",
    _completion_body,
    _read_completion,
    _read_completion_stream,
    lambda part: _read_completion_stream(part).messages[0]["content"] if "choices" in part else "",
)
GENERATE = Protocol(
    "generate", "/generate", _generate_body, _read_generated, _read_generated_stream, lambda part: ""
)
