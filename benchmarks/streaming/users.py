"""Users who read streams: chats by OpenAI's client, ids by SGLang's own /generate; sampled and greedy ones.

    0, 4, ...   conversations of several turns that name no session, some of them with stop strings
    1, 5, ...   greedy chats
    2, 6, ...   ids, sampled
    3, 7, ...   ids, greedy

Greedy requests are the same few again and again, each in a session of its own.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from benchmarks.streaming.answers import Heard, Span

TURNS = 3
"""Turns of a conversation."""

PROMPTS = [f"Prompt {number}: say something that has not been said before." for number in range(16)]
"""Prompts of greedy requests."""

STOPS = ("ab", "cd", "ef", "gh", "ij")

PATIENCE_S = 300.0
"""Longest time that a user waits for the next part of an answer."""


@dataclass
class Users:
    """All users of a run."""

    url: str
    key: str
    tokens: int
    """Largest number of tokens of an answer."""
    prompt_ids: Sequence[Sequence[int]]
    """Ids of ``PROMPTS``, as the chat template makes them."""
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: no further request begins."""
    heard: list[Heard] = field(default_factory=list[Heard])
    _prompts_of: dict[str, int] = field(default_factory=dict[str, int])
    """Prompts of sessions that were asked one of ``PROMPTS``."""

    async def talk(self, number: int) -> None:
        """Be ``number`` users at a time until ``enough``, and until the last answer has ended."""
        async with (
            self._client() as http,
            openai.AsyncOpenAI(
                api_key=self.key,
                base_url=f"{self.url}/v1",
                max_retries=0,
                http_client=http,
                timeout=PATIENCE_S,
            ) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for user in range(number):
                tasks.create_task(self._user(user, client, http), name=f"user {user}")

    async def repeat(self) -> None:
        """Ask for the second half of one greedy answer to each prompt, given its first half."""
        wholes = {}
        for heard in self.heard:
            if heard.greedy and heard.ids and heard.error is None:
                prompt = self._prompts_of[heard.session]
                wholes.setdefault(prompt, heard)
        async with self._client() as http, asyncio.TaskGroup() as tasks:
            for prompt, whole in wholes.items():
                tasks.create_task(self._repeat(http, prompt, whole), name=f"repeating prompt {prompt}")

    async def _repeat(self, http: httpx.AsyncClient, prompt: int, whole: Heard) -> None:
        assert whole.ids is not None and whole.logprobs is not None
        half = len(whole.ids) // 2
        rest = (whole.ids[half:], whole.logprobs[half:])
        heard = Heard(f"repeat-{prompt}", whole.limit - half, greedy=True, ids=[], logprobs=[], repeats=rest)
        await self._listen(heard, generate(http, heard, [*self.prompt_ids[prompt], *whole.ids[:half]]))

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=PATIENCE_S)

    async def _user(self, user: int, client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
        kind, count = user % 4, 0
        while not self.enough.is_set():
            prompt = (user // 4 + count) % len(PROMPTS)
            session = f"user-{user}-{count}"
            match kind:
                case 0:
                    await self._converse(client, f"User {user} begins conversation {count}.", user % 8 == 0)
                case 1:
                    heard = Heard(session, self.tokens, greedy=True)
                    messages = [{"role": "user", "content": PROMPTS[prompt]}]
                    await self._listen(heard, chat(client, heard, messages))
                case _:
                    heard = Heard(session, self.tokens, greedy=kind == 3, ids=[], logprobs=[])
                    self._prompts_of[session] = prompt
                    await self._listen(heard, generate(http, heard, self.prompt_ids[prompt]))
            count += 1

    async def _converse(self, client: openai.AsyncOpenAI, beginning: str, has_stops: bool) -> None:
        messages: list[Any] = []
        content, session = beginning, ""
        for turn in range(TURNS):
            if self.enough.is_set() and turn:
                return
            messages.append({"role": "user", "content": content})
            heard = Heard(session, self.tokens, stops=STOPS if has_stops else ())
            await self._listen(heard, chat(client, heard, messages))
            if heard.error is not None:
                return
            messages.append({"role": "assistant", "content": heard.text})
            content, session = f"Thanks. And what follows behind turn {turn}?", heard.session

    async def _listen(self, heard: Heard, parts: AsyncIterator[None]) -> None:
        """Read an answer to its end. Errors are a part of what was heard."""
        self.heard.append(heard)
        began = last = time.monotonic()
        try:
            async with aclosing(parts) as reading:  # pyright: ignore[reportArgumentType]
                async for _ in reading:
                    now = time.monotonic()
                    if last == began:
                        heard.first_s = now - began
                    else:
                        heard.pause_s = max(heard.pause_s, now - last)
                    last = now
        except (openai.OpenAIError, httpx.HTTPError, BadStream) as error:
            heard.error = f"{type(error).__name__}: {error} ({error.__cause__!r})"
        if heard.error is None and heard.completion_tokens is None:
            heard.finish = None  # the last event of the stream is missing


class BadStream(Exception):
    """A stream takes back what it has sent, or says that it has failed."""


async def chat(client: openai.AsyncOpenAI, heard: Heard, messages: Sequence[Any]) -> AsyncIterator[None]:
    """Read a chat completion, and yield at each of its parts."""
    stream = await client.chat.completions.create(
        model="policy",
        messages=list(messages),
        max_tokens=heard.limit,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"X-Session-Id": heard.session} if heard.greedy else {},
        **({"temperature": 0.0} if heard.greedy else {}),
        **({"stop": list(heard.stops)} if heard.stops else {}),
    )
    async with stream:
        async for chunk in stream:
            session = str((chunk.model_extra or {}).get("session_id"))
            if heard.session not in ("", session):
                raise BadStream(f"session {session}, and {heard.session} before")
            heard.session = session
            if chunk.usage is not None:
                heard.prompt_tokens = chunk.usage.prompt_tokens
                heard.completion_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if heard.finish is not None and (choice.delta.content or choice.finish_reason):
                    raise BadStream("there is more behind the end")
                heard.text += choice.delta.content or ""
                heard.finish = choice.finish_reason
            yield


async def generate(http: httpx.AsyncClient, heard: Heard, prompt: Sequence[int]) -> AsyncIterator[None]:
    """Read the reply of /generate, and yield at each of its parts."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"max_new_tokens": heard.limit, "temperature": 0.0 if heard.greedy else 1.0},
        "return_logprob": True,
        "stream": True,
    }
    headers = {"X-Session-Id": heard.session}
    has_ended = False
    async with http.stream("POST", "/generate", json=body, headers=headers) as reply:
        if reply.status_code != 200:
            raise BadStream(f"HTTP {reply.status_code}: {(await reply.aread()).decode()}")
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                has_ended = True
            elif line.startswith("data: "):
                _take(heard, json.loads(line[len("data: ") :]))
                yield
    if not has_ended:
        heard.completion_tokens = None


def _take(heard: Heard, part: dict[str, Any]) -> None:
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
    heard.prompt_tokens, heard.completion_tokens = meta["prompt_tokens"], meta["completion_tokens"]
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
