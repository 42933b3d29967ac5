"""Scripted users of a gateway: conversations over HTTP, and what each user has got.

    tick ──► request, streamed ──► [DONE] and the end of the stream ──► answered()
                │                                                          │
                └── 503, a broken connection: the same request again       └──► next tick

A user speaks at the ticks of a clock of its own, and misses those that come before its last answer has. So
the rate of answers is that of the ticks as long as nobody makes the users wait.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import aiohttp

AGAIN_S = 0.25
"""Time until a user sends a request again whose connection has broken."""

LONGEST_REFUSAL_S = 2.0
"""Longest time for which a user follows ``Retry-After``."""

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Answered:
    """A turn whose answer has arrived, its last byte included. Times are in seconds since the epoch."""

    session: str
    said: str
    """The last message of the request."""
    text: str
    tokens: int
    began_s: float
    first_s: float
    """When the first piece of the answer came."""
    ended_s: float


@dataclass(frozen=True)
class Habits:
    """How users speak."""

    every_s: float
    """Time between two ticks of a user."""
    turns: int
    """Turns of a conversation."""
    max_tokens: int
    """Longest answer."""
    says: Callable[[random.Random], str]
    """Makes what a user says next."""
    ends: float = 1.0
    """Share of the conversations whose end the user tells the gateway."""


@dataclass
class Crowd:
    """Users who all speak to one gateway. Single event loop."""

    url: str
    key: str
    size: int
    habits: Habits
    answered: Callable[[Answered], None]
    clock: Callable[[], float]
    """Returns the seconds since the epoch."""
    seed: int = 0
    name: str = "user"
    """Beginning of the names of sessions."""
    failures: Counter[str] = field(default_factory=Counter[str])
    """Requests that had to be sent again, by reason."""

    async def talk(self) -> None:
        """Talk until cancelled."""
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"Authorization": f"Bearer {self.key}"}
        async with (
            aiohttp.ClientSession(self.url, headers=headers, timeout=timeout, connector=connector) as http,
            asyncio.TaskGroup() as users,
        ):
            for number in range(self.size):
                users.create_task(self._user(http, number), name=f"{self.name}-{number}")

    async def _user(self, http: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(f"{self.seed}:{number}")
        ticks = _ticks(self.habits.every_s, asyncio.get_running_loop().time, number / self.size)
        for conversation in count():
            session = f"{self.name}-{number}-{conversation}"
            ends = rng.random() < self.habits.ends
            history: Messages = []
            # First conversations are of all lengths, so that they do not end all at one time.
            turns = self.habits.turns if conversation else 1 + number % self.habits.turns
            for turn in range(turns):
                await asyncio.sleep(next(ticks))
                history.append({"role": "user", "content": self.habits.says(rng)})
                is_last = ends and turn + 1 == turns
                answer = await self._ask(http, session, history, is_last)
                history.append({"role": "assistant", "content": answer.text})
                self.answered(answer)

    async def _ask(
        self, http: aiohttp.ClientSession, session: str, history: Messages, is_last: bool
    ) -> Answered:
        """Return the answer to a conversation, however often it has to be asked for."""
        body = {
            "model": "policy",
            "messages": history,
            "max_tokens": self.habits.max_tokens,
            "session_id": session,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"session_done": True} if is_last else {}),
        }
        began_s = self.clock()
        for attempt in count():
            try:
                text, tokens, first_s = await self._stream(http, body, attempt)
            except _Refused as refused:
                self.failures[refused.reason] += 1
                await asyncio.sleep(refused.wait_s)
            except (aiohttp.ClientError, OSError, TimeoutError, _CutOff) as error:
                self.failures[type(error).__name__.removeprefix("_")] += 1
                await asyncio.sleep(AGAIN_S)
            else:
                return Answered(session, history[-1]["content"], text, tokens, began_s, first_s, self.clock())
        raise AssertionError("the attempts never end")

    async def _stream(
        self, http: aiohttp.ClientSession, body: dict[str, object], attempt: int
    ) -> tuple[str, int, float]:
        """Return text and number of tokens of an answer, and the time of its first piece."""
        headers = {"x-stainless-retry-count": str(attempt)}
        pieces: list[str] = []
        tokens, first_s, is_done = 0, 0.0, False
        async with http.post("/v1/chat/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise _Refused(f"HTTP {response.status}", _wait_s(response))
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if not line.startswith(b"data: "):
                    continue
                if data == b"[DONE]":
                    is_done = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise _Refused("an error in the stream", AGAIN_S)
                for choice in event.get("choices", ()):
                    pieces.append(choice["delta"].get("content") or "")
                    first_s = first_s or self.clock()
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
        if not is_done:
            raise _CutOff
        return "".join(pieces), tokens, first_s


class _Refused(Exception):
    """The gateway has refused a request."""

    def __init__(self, reason: str, wait_s: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_s = wait_s


class _CutOff(Exception):
    """An answer has ended before its end."""


def _wait_s(response: aiohttp.ClientResponse) -> float:
    with suppress(ValueError):
        return min(LONGEST_REFUSAL_S, max(AGAIN_S, float(response.headers.get("Retry-After", AGAIN_S))))
    return AGAIN_S


def _ticks(every_s: float, clock: Callable[[], float], phase: float) -> Iterator[float]:
    """Yield the time from now to the next tick. Ticks that have passed are missed."""
    begin = clock() + phase * every_s
    while True:
        now = clock()
        missed = max(0, int((now - begin) // every_s) + 1)
        begin += missed * every_s
        yield max(0.0, begin - now)
        begin += every_s
