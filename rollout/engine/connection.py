"""The HTTP connection to one SGLang server: requests, replies, streamed replies, and how they fail.

Knows nothing of what is asked: generation requests are in ``client.py``, control calls in
``server_control.py``.
"""

import asyncio
import errno
import json
import logging
import socket
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self, cast

import aiohttp
import orjson

from slipstream.rollout.system.key import NO_KEY, Key

log = logging.getLogger(__name__)

SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
"""Errors of a process or machine that is short of descriptors, ports, buffers or memory."""

UNRESOLVED = frozenset({socket.EAI_AGAIN, socket.EAI_MEMORY})
"""Errors of a resolver that may know the name later. Without descriptors it can ask nobody."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0

PERIOD_S = 30.0
"""Time between two messages about shortages."""


def is_local(error: BaseException) -> bool:
    """True if an error of the network is a shortage of this process.

    Libraries wrap errors: with the same number, or with the original one as the cause.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return cause.errno in UNRESOLVED
        if isinstance(cause, OSError) and cause.errno in SHORT:
            return True
        cause = cause.__cause__
    return False


def pauses() -> Iterator[float]:
    """Yield the seconds to wait before each further attempt, forever."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class ShortageLog:
    """Names the shortages of a process in its log, at most once in ``PERIOD_S``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s: float | None = None
        self._unnamed = 0

    def note(self, error: BaseException) -> None:
        """Take note of an attempt that has failed."""
        self._unnamed += 1
        now_s = self._clock()
        if self._next_s is not None and now_s < self._next_s:
            return
        log.warning(
            "this process cannot open connections (%d attempts failed; the last one: %s); no engine is to "
            "blame, and requests wait. If descriptors are short, raise the limit (`ulimit -n`) or lower "
            "rollout.max_concurrent",
            self._unnamed,
            error,
        )
        self._next_s, self._unnamed = now_s + PERIOD_S, 0


SHORTAGES = ShortageLog()
"""The log of this process."""


KEPT_S = 2.0
"""Longest time that a connection is kept for the next streamed reply, in seconds. Servers close idle ones
after 5."""

END_S = 0.1
"""Longest wait for the end of a streamed reply of which everything has come, in seconds."""

REQUESTS_FAULT = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
"""Statuses by which a server says what is wrong with a request."""


class EngineError(RuntimeError):
    """A request has failed, though its server may be well: the server refused it, sent a malformed reply, or
    was never asked. The message holds the server's own words."""


class RequestRefused(EngineError):
    """The server has read the request and says what is wrong with it: it would refuse it again."""


class Malformed(EngineError):
    """The server failed inside, or sent what cannot be a reply: the request is not to blame."""


class NotSent(EngineError):
    """This process could not open or keep a connection for lack of descriptors, ports or memory. Nothing is
    known against the server."""


class EngineLost(ConnectionError):
    """The server is gone or does not reply. Another server may be asked for the same thing."""


@dataclass(frozen=True)
class EngineAddress:
    """Address and limits of one server. Plain data, so that it can travel between processes."""

    name: str
    url: str
    ranks: int
    """Processes of the engine that together hold the weights, on all of its nodes."""
    vocab_size: int
    max_length: int
    """Largest number of tokens of prompt and completion together."""
    timeout_s: float
    """Longest silence about a request, in seconds. A server is silent about a request that waits in its queue
    or while it is paused for an update, so that those times have to fit in."""
    answer_timeout_s: float = 20.0
    """Longest time, in seconds, in which a server that serves says that it is well."""
    stream_interval: int = 64
    """Tokens between two chunks of a completion."""
    key: Key = NO_KEY
    """Secret without which the server refuses every request."""
    adapter: str | None = None
    """Name of the adapter that requests ask for; None: the server's weights are those of the policy."""


class EngineConnection:
    """Sends requests to one server. Create and use it inside one event loop; ``close`` it at the end."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.name = address.name
        self.ranks = address.ranks
        self._streams: set[aiohttp.ClientResponse] = set()
        self._is_starved = False
        """True while this process cannot open a connection, for reasons of its own."""
        self._timeout = aiohttp.ClientTimeout(total=address.timeout_s)
        # The pool bounds the number of requests, each of which is a connection; a second limit here would let
        # calls that abort requests wait for the requests.
        self._session = self._new_session(aiohttp.TCPConnector(limit=0, force_close=True))
        self._kept = self._new_session(aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S))
        """Connects for streamed replies only: opening a connection takes a fifth of the time that a user
        waits for the gateway."""

    def _new_session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            base_url=self.address.url,
            headers={"Authorization": self.address.key.header} if self.address.key else None,
            timeout=self._timeout,
            connector=connector,
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
        await self._kept.close()
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
            async with await self._send(method, path, data=data, json=fields) as response:
                text = await response.text()
        except TimeoutError as error:
            raise EngineLost(f"{self.name} {path}: no reply within {self.address.timeout_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise (self._not_sent if is_local(error) else self._lost)(path, error) from error
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

        Raises EngineError when the server refuses the request or cannot be asked, ValueError for a malformed
        event, and errors of the network as they come: TimeoutError after a silence of ``address.timeout_s``,
        ClientError or OSError. A block that ends without an error has read all that it needs.
        """
        timeout_s = self.address.timeout_s
        silence = aiohttp.ClientTimeout(sock_connect=timeout_s, sock_read=timeout_s)
        try:
            response = await self._send("POST", path, json=body, timeout=silence, session=self._kept)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError):
            # The server may just have closed a connection that was kept. If it is gone, a new one says so.
            response = await self._send("POST", path, json=body, timeout=silence)
        async with response:
            if response.status != 200:
                raise self._refusal(path, response.status, await response.text())
            self._streams.add(response)
            try:
                yield events(response.content.iter_any())
                await _read_to_end(response)  # else the connection could not be kept
            finally:
                self._streams.discard(response)

    async def _send(
        self,
        method: str,
        path: str,
        *,
        json: Mapping[str, object] | None = None,
        data: bytes | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
        session: aiohttp.ClientSession | None = None,
    ) -> aiohttp.ClientResponse:
        """Send a request, on a new connection unless a session is given. Return its reply with the body still
        to be read.

        While this process cannot open a connection, for reasons of its own, the request waits and is tried
        again. Raises NotSent when that takes longer than ``address.timeout_s``, and errors of the network as
        they come.
        """
        began_s = asyncio.get_running_loop().time()
        for pause_s in pauses():
            try:
                response = await (session or self._session).request(
                    method,
                    path,
                    data=data,
                    json=json,
                    timeout=timeout or self._timeout,
                    allow_redirects=False,
                )
            except aiohttp.ClientConnectorError as error:  # nothing has reached the server
                if not is_local(error):
                    raise
                self._is_starved = True
                SHORTAGES.note(error)
                if asyncio.get_running_loop().time() - began_s >= self.address.timeout_s:
                    raise self._not_sent(path, error) from error
                await asyncio.sleep(pause_s)
                self._check_open(path)
            else:
                self._is_starved = False
                return response
        raise AssertionError("the pauses never end")

    def _check_open(self, path: str) -> None:
        if self._session.closed:
            raise EngineLost(f"{self.name} {path}: the engine has been given up")

    def _lost(self, path: str, error: Exception) -> EngineLost:
        return EngineLost(f"{self.name} {path}: {type(error).__name__}: {error}")

    def _not_sent(self, path: str, error: Exception) -> NotSent:
        return NotSent(f"{self.name} {path}: this process is short of something: {error}")

    def _refusal(self, path: str, status: int, text: str) -> EngineError:
        return _kind(status)(f"{self.name} {path}: HTTP {status}: {text[:500]}")


def _kind(status: int) -> type[EngineError]:
    if status in REQUESTS_FAULT:
        return RequestRefused
    return Malformed if status == HTTPStatus.INTERNAL_SERVER_ERROR else EngineError


async def _read_to_end(response: aiohttp.ClientResponse) -> None:
    """Read the rest of a reply that nobody needs, unless that takes too long."""
    with suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(END_S):
            async for _ in response.content.iter_any():
                pass  # the completion has come: only the end of the reply is missing


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
    with suppress(ValueError):
        return orjson.loads(text)
    try:
        return json.loads(text)  # which reads NaN, too
    except ValueError as error:
        raise ValueError(f"not JSON: {error}: {text[:500].decode(errors='replace')}") from error
