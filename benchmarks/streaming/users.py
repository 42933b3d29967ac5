"""Users who read streams of all protocols all the time, until they have had enough.

    0, 4, ...   chats of several turns that name no session, some of them with stop strings
    1, 5, ...   greedy requests of one protocol after the other
    2, 6, ...   ids, sampled
    3, 7, ...   ids, greedy

Greedy requests are the same few again and again, each in a session of its own.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from benchmarks.streaming.answers import Heard
from benchmarks.streaming.protocols import (
    FAILURES,
    Clients,
    chat,
    complete,
    connections,
    generate,
    message,
    respond,
)

TURNS = 3
"""Turns of a conversation."""

PROMPTS = [f"Prompt {number}: say something that has not been said before." for number in range(16)]
"""Prompts of greedy requests."""

STOPS = ("ab", "cd", "ef", "gh", "ij")


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
    _wholes: dict[int, Heard] = field(default_factory=dict[int, Heard])
    """A greedy answer to each of ``PROMPTS``, with its ids."""

    async def talk(self, number: int) -> None:
        """Be ``number`` users at a time until ``enough``, and until the last answer has ended."""
        async with connections(self.url, self.key) as http, asyncio.TaskGroup() as tasks:
            clients = Clients.of(http, self.url, self.key)
            for user in range(number):
                tasks.create_task(self._user(user, clients), name=f"user {user}")

    async def repeat(self) -> None:
        """Ask for the second half of one greedy answer to each prompt, given its first half."""
        async with connections(self.url, self.key) as http, asyncio.TaskGroup() as tasks:
            clients = Clients.of(http, self.url, self.key)
            for prompt, whole in self._wholes.items():
                tasks.create_task(self._repeat(clients, prompt, whole), name=f"repeating prompt {prompt}")

    async def _repeat(self, clients: Clients, prompt: int, whole: Heard) -> None:
        assert whole.ids is not None and whole.logprobs is not None
        half = len(whole.ids) // 2
        rest = (whole.ids[half:], whole.logprobs[half:])
        heard = Heard(f"repeat-{prompt}", whole.limit - half, greedy=True, repeats=rest)
        await self._listen(heard, generate(clients, heard, [*self.prompt_ids[prompt], *whole.ids[:half]]))

    async def _user(self, user: int, clients: Clients) -> None:
        count = 0
        while not self.enough.is_set():
            prompt = (user // 4 + count) % len(PROMPTS)
            heard = Heard(f"user-{user}-{count}", self.tokens, greedy=user % 2 == 1)
            match user % 4:
                case 0:
                    await self._converse(clients, f"User {user} begins conversation {count}.", user % 8 == 0)
                case 1:
                    await self._listen(heard, _greedy(clients, heard, PROMPTS[prompt], count))
                case _:
                    await self._listen(heard, generate(clients, heard, self.prompt_ids[prompt]))
                    if heard.greedy and heard.ids and heard.error is None:
                        self._wholes.setdefault(prompt, heard)
            count += 1

    async def _converse(self, clients: Clients, beginning: str, has_stops: bool) -> None:
        messages: list[Any] = []
        content, session = beginning, ""
        for turn in range(TURNS):
            if self.enough.is_set() and turn:
                return
            messages.append({"role": "user", "content": content})
            heard = Heard(session, self.tokens, is_unnamed=True, stops=STOPS if has_stops else ())
            await self._listen(heard, chat(clients, heard, messages))
            if heard.error is not None:
                return
            messages.append({"role": "assistant", "content": heard.text})
            content, session = f"Thanks. And what follows turn {turn}?", heard.session

    async def _listen(self, heard: Heard, parts: AsyncIterator[None]) -> None:
        """Read an answer to its end. Errors are a part of what was heard."""
        self.heard.append(heard)
        began = last = time.monotonic()
        try:
            async with aclosing(cast("AsyncGenerator[None]", parts)) as reading:
                async for _ in reading:
                    now = time.monotonic()
                    if last == began:
                        heard.first_s = now - began
                    else:
                        heard.pause_s = max(heard.pause_s, now - last)
                    last = now
        except FAILURES as error:
            heard.error = f"{type(error).__name__}: {error} ({error.__cause__!r})"
        if heard.error is None and heard.completion_tokens is None:
            heard.finish = None  # the last event of the stream is missing


def _greedy(clients: Clients, heard: Heard, prompt: str, count: int) -> AsyncIterator[None]:
    """Ask in one of the protocols without ids."""
    match count % 4:
        case 0:
            return chat(clients, heard, [{"role": "user", "content": prompt}])
        case 1:
            return message(clients, heard, prompt)
        case 2:
            return respond(clients, heard, prompt)
        case _:
            return complete(clients, heard, prompt)
