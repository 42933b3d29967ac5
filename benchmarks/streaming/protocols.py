"""Streams of several protocols, read part by part: by the official clients, and as SGLang sends ids.

Each reader fills in what is heard, and yields at each part that comes.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import httpx2
import openai

from benchmarks.streaming.answers import Heard, Span

PATIENCE_S = 300.0
"""Longest time that a user waits for the next part of an answer."""

MODEL = "policy"

FINISHES = {
    "stop": "stop",
    "length": "length",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "response.completed": "stop",
    "response.incomplete": "length",
}
"""Reasons of an end in the words of each protocol."""


class BadStream(Exception):
    """A stream takes back what it has sent, or says that it has failed."""


FAILURES = (openai.OpenAIError, anthropic.AnthropicError, httpx.HTTPError, httpx2.HTTPError, BadStream)


@dataclass(frozen=True)
class Clients:
    """The clients of a user. Anthropic's has connections of its own, because it uses another library."""

    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    @classmethod
    def of(cls, http: httpx.AsyncClient, url: str, key: str) -> "Clients":
        settings: dict[str, Any] = {"api_key": key, "max_retries": 0, "timeout": PATIENCE_S}
        return cls(
            http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", http_client=http, **settings),
            anthropic.AsyncAnthropic(base_url=url, **settings),
        )


def connections(url: str, key: str) -> httpx.AsyncClient:
    """Return the connections of all users."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=PATIENCE_S)


async def chat(clients: Clients, heard: Heard, messages: Sequence[Any]) -> AsyncIterator[None]:
    """Read a chat completion."""
    stream = await clients.openai.chat.completions.create(
        model=MODEL,
        messages=list(messages),
        max_tokens=heard.limit,
        stream=True,
        stream_options={"include_usage": True},
        stop=list(heard.stops) or openai.omit,
        temperature=0.0 if heard.greedy else openai.omit,
        extra_headers=_session(heard),
    )
    async with stream:
        async for chunk in stream:
            _take_session(heard, chunk.model_extra)
            for choice in chunk.choices:
                _take_text(heard, choice.delta.content or "", choice.finish_reason)
            if chunk.usage is not None:
                _take_usage(heard, chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
            yield


async def complete(clients: Clients, heard: Heard, prompt: str) -> AsyncIterator[None]:
    """Read a completion of a text."""
    stream = await clients.openai.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=heard.limit,
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.0 if heard.greedy else openai.omit,
        extra_headers=_session(heard),
    )
    async with stream:
        async for chunk in stream:
            _take_session(heard, chunk.model_extra)
            for choice in chunk.choices:
                _take_text(heard, choice.text, choice.finish_reason)
            if chunk.usage is not None:
                _take_usage(heard, chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
            yield


async def respond(clients: Clients, heard: Heard, content: str) -> AsyncIterator[None]:
    """Read a response."""
    stream = await clients.openai.responses.create(
        model=MODEL,
        input=content,
        max_output_tokens=heard.limit,
        stream=True,
        temperature=0.0 if heard.greedy else openai.omit,
        extra_headers=_session(heard),
    )
    async with stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                _take_text(heard, event.delta, None)
            elif event.type == "response.completed" or event.type == "response.incomplete":
                _take_text(heard, "", event.type)
                usage = event.response.usage
                if usage is not None:
                    _take_usage(heard, usage.input_tokens, usage.output_tokens)
            elif event.type in ("response.failed", "error"):
                raise BadStream(event.to_json())
            yield


async def message(clients: Clients, heard: Heard, content: str) -> AsyncIterator[None]:
    """Read a message of Anthropic's protocol."""
    stream = await clients.anthropic.messages.create(
        model=MODEL,
        messages=[{"role": "user", "content": content}],
        max_tokens=heard.limit,
        stream=True,
        extra_headers=_session(heard),
        extra_body={"temperature": 0.0} if heard.greedy else None,
    )
    prompt_tokens = 0
    async with stream:
        async for event in stream:
            if event.type == "message_start":
                prompt_tokens = event.message.usage.input_tokens
            elif event.type == "content_block_delta" and event.delta.type == "text_delta":
                _take_text(heard, event.delta.text, None)
            elif event.type == "message_delta":
                _take_text(heard, "", event.delta.stop_reason)
                _take_usage(heard, event.usage.input_tokens or prompt_tokens, event.usage.output_tokens)
            yield


async def generate(clients: Clients, heard: Heard, prompt: Sequence[int]) -> AsyncIterator[None]:
    """Read the reply of SGLang's /generate, which has ids."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"max_new_tokens": heard.limit, "temperature": 0.0 if heard.greedy else 1.0},
        "return_logprob": True,
        "stream": True,
    }
    heard.ids, heard.logprobs = [], []
    has_ended = False
    async with clients.http.stream("POST", "/generate", json=body, headers=_session(heard)) as reply:
        if reply.status_code != 200:
            raise BadStream(f"HTTP {reply.status_code}: {(await reply.aread()).decode()}")
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                has_ended = True
            elif line.startswith("data: "):
                _take_part(heard, json.loads(line[len("data: ") :]))
                yield
    if not has_ended:
        heard.completion_tokens = None


def _session(heard: Heard) -> dict[str, str]:
    return {"X-Session-Id": heard.session} if heard.session and not heard.is_unnamed else {}


def _take_session(heard: Heard, values: Mapping[str, Any] | None) -> None:
    """Take the name of the session. Raises BadStream if it is not the one of before."""
    session = str((values or {}).get("session_id"))
    if heard.session not in ("", session):
        raise BadStream(f"session {session}, and {heard.session} before")
    heard.session = session


def _take_text(heard: Heard, text: str, finish: str | None) -> None:
    """Take further text, or the end. Raises BadStream for anything after the end."""
    if heard.finish is not None and (text or finish):
        raise BadStream(f"there is more after the end: {text!r}, {finish}")
    heard.text += text
    if finish is not None:
        heard.finish = FINISHES.get(finish, finish)


def _take_usage(heard: Heard, prompt: int, completion: int) -> None:
    heard.prompt_tokens, heard.completion_tokens = prompt, completion


def _take_part(heard: Heard, part: dict[str, Any]) -> None:
    """Take a part of a reply, which repeats all that was there before. Raises BadStream if it does not."""
    if "error" in part:
        raise BadStream(json.dumps(part["error"]))
    meta, ids, text = part["meta_info"], part["output_ids"], part["text"]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    assert heard.ids is not None and heard.logprobs is not None
    is_longer = text.startswith(heard.text) and ids[: len(heard.ids)] == heard.ids
    if heard.finish is not None or not is_longer or logprobs[: len(heard.logprobs)] != heard.logprobs:
        raise BadStream(f"a part takes back what was sent: {heard.text!r}, then {text!r}")
    if [entry[1] for entry in meta["output_token_logprobs"]] != ids or meta["completion_tokens"] != len(ids):
        raise BadStream(f"{meta['completion_tokens']} tokens, {len(ids)} ids, {len(logprobs)} log-probs")
    heard.text, heard.ids, heard.logprobs = text, ids, logprobs
    _take_usage(heard, meta["prompt_tokens"], meta["completion_tokens"])
    if meta["finish_reason"] is not None:
        heard.finish = meta["finish_reason"]["type"]
        heard.spans = _spans(meta["weight_versions"])


def _spans(reported: Sequence[dict[str, Any]]) -> list[Span]:
    """Return version spans, each of which begins where the one before ends. Raises BadStream."""
    begin, spans = 0, list[Span]()
    for span in reported:
        if span["start"] != begin:
            raise BadStream(f"version spans do not tile the answer: {reported}")
        begin = span["end"]
        spans.append((int(span["version"]), span["end"] - span["start"]))
    return spans
