"""The reward that a server gives: one POST for each response.

request   {"prompt": text or chat, "response": text, "label": any, "metadata": {...}}
answer    a number, or an object of numbers
"""

import asyncio
import json
import math
import os
import random
import reprlib
from collections.abc import Mapping
from typing import NoReturn, cast
from urllib.parse import urlsplit

import aiohttp

from slipstream.rollout.reward.value import number_of
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory

LONGEST_WAIT_S = 60.0
"""Most seconds between two requests."""

SHOWN = 300
"""Characters of an answer in an error."""


class ServerUnavailable(RuntimeError):
    """The server cannot be reached, is too slow, or says that it cannot answer now."""


class Remote:
    """The number that a server answers, or an object of numbers, of which ``rollout.reward_key`` trains.

    A request that gets no answer in time, no connection, or one of the codes 429 and 500 to 599, is sent
    again after a wait that doubles each time; the server's ``Retry-After`` makes it longer. Any other code,
    and an answer that is no number (``null``, ``NaN``, no JSON), is a failed attempt at judging at once.

    All of this has to fit into ``rollout.judging.timeout_s``.
    """

    def __init__(
        self,
        url: str,
        key_variable: str | None = None,
        timeout_s: float = 30.0,
        requests: int = 4,
        retry_after_s: float = 1.0,
        longest_request: int = 16 << 20,
        longest_answer: int = 1 << 20,
    ) -> None:
        """``key_variable``: environment variable with a key, which is sent as ``Authorization: Bearer KEY``.
        ``timeout_s``: seconds of one request. ``requests``: most requests of one attempt at judging.
        ``retry_after_s``: seconds between the first two. ``longest_request``, ``longest_answer``: bytes.
        """
        problems = [
            f"{name}: found {value!r}, expected a number above 0"
            for name, value in (
                ("timeout_s", timeout_s),
                ("requests", requests),
                ("retry_after_s", retry_after_s),
                ("longest_request", longest_request),
                ("longest_answer", longest_answer),
            )
            if isinstance(cast(object, value), bool)
            or not isinstance(cast(object, value), int | float)
            or value <= 0
        ]
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            problems.append(f"url: found {url!r}, expected http://HOST... or https://HOST...")
        self._headers = {"Content-Type": "application/json"}
        if key_variable is not None:
            key = os.environ.get(key_variable, "").strip()
            if not key:
                problems.append(f"key_variable: the environment variable {key_variable} has no key")
            self._headers["Authorization"] = f"Bearer {key}"
        if problems:
            raise ValueError("\n".join(problems))
        self._url = url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._requests = int(requests)
        self._retry_after_s = retry_after_s
        self._longest_request = int(longest_request)
        self._longest_answer = int(longest_answer)
        self._session: tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession] | None = None

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError for a label that is no number of JSON: it is missing in a table."""
        label: object = prompt.label
        if isinstance(label, float) and not math.isfinite(label):
            raise ValueError(f"{prompt.reference} has the label {label!r}, expected a value: it is missing")

    async def score(
        self, prompt: Prompt, response: str, trajectory: Trajectory
    ) -> float | Mapping[str, float]:
        """Return the server's answer. Raises ServerUnavailable after the last request, and ValueError."""
        body, reason = self._body(prompt, response), ""
        for number in range(self._requests):
            try:
                return _value(await self._answer(body))
            except (ServerUnavailable, aiohttp.ClientConnectionError, TimeoutError) as error:
                reason = str(error) or f"no answer in {self._timeout.total:g} s"
                wait_s = self._wait_s(number, error)
            if number + 1 < self._requests:
                await asyncio.sleep(wait_s)
        raise ServerUnavailable(f"{self._url}: {reason}, in the last of {self._requests} requests")

    def _body(self, prompt: Prompt, response: str) -> bytes:
        fields = {
            "prompt": prompt.prompt,
            "response": response,
            "label": prompt.label,
            "metadata": prompt.metadata,
        }
        try:
            body = json.dumps(fields, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{prompt.reference} has a label or metadata that JSON does not have: {error}"
            ) from None
        if len(body) > self._longest_request:
            raise ValueError(
                f"{prompt.reference} and its response are {len(body)} bytes of JSON, expected at most "
                f"{self._longest_request} (args: longest_request)"
            )
        return body

    async def _answer(self, body: bytes) -> bytes:
        session = self._open_session()
        async with session.post(self._url, data=body, headers=self._headers, allow_redirects=False) as reply:
            answer = await _read(reply, self._longest_answer + 1)
            if reply.status == 429 or reply.status >= 500:
                raise ServerUnavailable(
                    f"status {reply.status}: {_shown(answer)}", reply.headers.get("Retry-After", "")
                )
            if not 200 <= reply.status < 300:
                raise ValueError(f"{self._url}: status {reply.status}: {_shown(answer)}")
        if len(answer) > self._longest_answer:
            raise ValueError(
                f"{self._url}: an answer of more than {self._longest_answer} bytes (args: longest_answer)"
            )
        return answer

    def _open_session(self) -> aiohttp.ClientSession:
        """Return the session of the running event loop; a judge process has one loop at a time."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session[0] is not loop:
            self._session = loop, aiohttp.ClientSession(timeout=self._timeout)
        return self._session[1]

    def _wait_s(self, failures: int, error: Exception) -> float:
        """Return the seconds until the next request: up to a quarter more than due, lest all come at once."""
        wait_s = self._retry_after_s * 2**failures
        if isinstance(error, ServerUnavailable) and str(error.args[-1]).isdecimal():
            wait_s = max(wait_s, float(error.args[-1]))
        return min(LONGEST_WAIT_S, wait_s * random.uniform(1, 1.25))


async def _read(reply: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the body, or its first ``most`` bytes and a little more."""
    parts: list[bytes] = []
    size = 0
    async for part in reply.content.iter_any():
        parts.append(part)
        size += len(part)
        if size >= most:
            break
    return b"".join(parts)


def _value(answer: bytes) -> float | Mapping[str, float]:
    """Return the number or the object of numbers in an answer. Raises ValueError."""
    try:
        value: object = json.loads(answer, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the server's answer is no JSON: {error}; it is {_shown(answer)}") from None
    if isinstance(value, Mapping):
        return cast("Mapping[str, float]", value)
    if isinstance(value, str):
        raise ValueError(
            f"the server answers {reprlib.repr(value)}, expected a number or an object of numbers"
        )
    return number_of(value)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _shown(answer: bytes) -> str:
    return repr(answer[:SHOWN].decode(errors="replace"))
