"""The HTTP connection to one SGLang server: requests, replies, streamed replies, and how they fail.

Knows nothing of what is asked: generation requests are in ``client.py``, control calls in
``server_control.py``.
"""

import json
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self, cast

import aiohttp

from slipstream.rollout.engine.key import NO_KEY, Key


class EngineError(RuntimeError):
    """The server refused a request or sent a malformed reply. The message holds the server's own words."""


class Malformed(EngineError):
    """The server failed inside, or sent what cannot be a reply: the fault is the server's, not the request's."""


class EngineLost(ConnectionError):
    """The server is gone or does not reply. Another server may be asked for the same thing."""


@dataclass(frozen=True)
class EngineAddress:
    """Address and limits of one server. Plain data, so that it can travel between processes."""

    name: str
    url: str
    ranks: int
    """Processes of the server, which together hold the weights (tensor parallelism)."""
    vocab_size: int
    max_length: int
    """Largest number of tokens of prompt and completion together."""
    timeout_s: float
    """Longest silence about a request, in seconds. A server is silent about a request that waits in its queue
    or while it is paused for an update, so that those times have to fit in."""
    stream_interval: int = 64
    """Tokens between two chunks of a completion."""
    key: Key = NO_KEY
    """Secret without which the server refuses every request."""


class EngineConnection:
    """Sends requests to one server. Create and use it inside one event loop; ``close`` it at the end."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.name = address.name
        self.ranks = address.ranks
        self._streams: set[aiohttp.ClientResponse] = set()
        self._session = aiohttp.ClientSession(
            base_url=address.url,
            headers={"Authorization": address.key.header} if address.key else None,
            timeout=aiohttp.ClientTimeout(total=address.timeout_s),
            # The idle server may just be closing a connection that was kept; a POST on it would look like
            # the loss of the engine.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all running requests: each of them raises EngineLost."""
        # Closing the session alone would leave requests in the middle of a streamed reply waiting forever.
        for response in self._streams:
            response.close()
        await self._session.close()

    async def _post(self, path: str, body: Mapping[str, object]) -> object:
        return await self._request("POST", path, body)

    async def _get(self, path: str) -> object:
        return await self._request("GET", path, None)

    async def _request(self, method: str, path: str, body: Mapping[str, object] | bytes | None) -> object:
        """Send a request and return its reply: JSON, or text. Raises EngineError and EngineLost."""
        self._check_open(path)
        data, fields = (body, None) if isinstance(body, bytes) else (None, body)
        try:
            async with self._session.request(
                method, path, data=data, json=fields, allow_redirects=False
            ) as response:
                text = await response.text()
        except TimeoutError as error:
            raise EngineLost(f"{self.name} {path}: no reply within {self.address.timeout_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, error) from error
        if response.status != 200:
            raise self._refusal(path, response.status, text)
        try:
            reply: object = json.loads(text) if text.startswith(("{", "[")) else text
        except ValueError as error:
            raise Malformed(f"{self.name} {path}: not JSON: {error}: {text[:500]}") from error
        if isinstance(reply, dict):
            verdict = cast("dict[str, object]", reply)
            if verdict.get("success") is False:
                raise EngineError(f"{self.name} {path}: {verdict.get('message', verdict)}")
        return reply

    @asynccontextmanager
    async def _streamed(self, path: str, body: Mapping[str, object]) -> AsyncIterator[AsyncIterator[object]]:
        """Send a request and give the JSON of each event of its reply.

        Raises EngineError when the server refuses the request, ValueError for a malformed event, and errors
        of the network as they come: TimeoutError after a silence of ``address.timeout_s``, ClientError or
        OSError.
        """
        timeout_s = self.address.timeout_s
        silence = aiohttp.ClientTimeout(sock_connect=timeout_s, sock_read=timeout_s)
        async with self._session.post(path, json=body, timeout=silence, allow_redirects=False) as response:
            if response.status != 200:
                raise self._refusal(path, response.status, await response.text())
            self._streams.add(response)
            try:
                yield events(response.content.iter_any())
            finally:
                self._streams.discard(response)

    def _check_open(self, path: str) -> None:
        if self._session.closed:
            raise EngineLost(f"{self.name} {path}: the engine has been given up")

    def _lost(self, path: str, error: Exception) -> EngineLost:
        return EngineLost(f"{self.name} {path}: {type(error).__name__}: {error}")

    def _refusal(self, path: str, status: int, text: str) -> EngineError:
        kind = Malformed if status == HTTPStatus.INTERNAL_SERVER_ERROR else EngineError
        return kind(f"{self.name} {path}: HTTP {status}: {text[:500]}")


async def events(data: AsyncIterable[bytes]) -> AsyncIterator[object]:
    """Yield the JSON of each server-sent event up to `[DONE]`. Raises ValueError for anything else."""
    buffer = b""
    async for piece in data:
        *whole, buffer = (buffer + piece).split(b"\n\n")
        for event in whole:
            if event == b"data: [DONE]":
                return
            yield _json(event.removeprefix(b"data: "))
    if buffer:
        yield _json(buffer)


def _json(text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}: {text[:500].decode(errors='replace')}") from error
