"""Several gateway processes as one endpoint: each conversation belongs to one of them, the others forward.

    user ──► any process ──belongs here──► endpoints
                  └──────belongs to another──► its peer port ──► endpoints there

A conversation is placed by the name of its session, and by the API key where the client names none: histories
are compared under one key. Names that a gateway makes up are drawn until they belong to it, so that a client
that comes back with one reaches the process that has its session.

A request is sent on as it came, and its reply is passed on as it comes. While the other process starts again,
requests for it wait; they are refused with 503 only if that takes too long.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import cast

import aiohttp
import orjson
from yarl import URL

from slipstream.rollout.gateway.conversations import KeyRing
from slipstream.rollout.gateway.naming import (
    addressed_request,
    client_session,
    key_of,
    request_of,
    session_name,
)
from slipstream.rollout.gateway.peers import GatewayAddress
from slipstream.rollout.gateway.serving.limits import Refusal
from slipstream.rollout.gateway.serving.words import error_body, protocol_of, words_of
from slipstream.rollout.system.key import Application, Key, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

SECRET_HEADER = b"x-slipstream-peer"
"""Header by which a process shows that it is one of the run's."""

WAIT_S = 30.0
"""Longest time that a request waits for a process that cannot be reached."""

RETRY_S = 5.0
"""Time after which a client should try again to reach such a process."""

PAUSE_S = 0.2
"""Time between two attempts to reach a process: no event says that it listens again."""

HOP_HEADERS = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-connection"}
)
"""Headers of one connection, which are not passed on."""

NAMED_IN_BODY = (b'"session_id"', b'"previous_response_id"', b'"rid"', b'"response_id"', b'"session"')
"""A body without any of these names neither a session nor a request, and need not be read."""


class Owners:
    """Says which process a conversation belongs to."""

    def __init__(self, number: int, processes: int) -> None:
        """``number``: of this process, from 0."""
        self.number = number
        self.processes = processes

    def of(self, name: str) -> int:
        """Return the process that a session, a response or an API key of this name belongs to."""
        digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "little") % self.processes

    def mint(self) -> str:
        """Return a new name that nobody can guess and that belongs to this process."""
        while self.of(name := secrets.token_hex(16)) != self.number:
            pass
        return name


class Forwarding:
    """An ASGI application that sends requests of other processes' conversations on to them."""

    def __init__(
        self,
        application: Application,
        owners: Owners,
        keys: KeyRing,
        address_of: Callable[[int], GatewayAddress | None],
        *,
        longest_body: int,
        wait_s: float = WAIT_S,
    ) -> None:
        """``address_of``: returns where a process listens now. ``longest_body``: bytes; the application
        refuses longer ones.
        """
        self._application = application
        self._owners = owners
        self._keys = keys
        self._address_of = address_of
        self._longest_body = longest_body
        self._wait_s = wait_s
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (
            scope["method"] != "POST" and addressed_request(scope["path"], {}) is None
        ):
            await self._application(scope, receive, send)
            return
        body = _Body(receive)
        await body.read(self._longest_body)
        owner = self._owner(scope, body)
        if owner == self._owners.number:
            await self._application(scope, body.again, send)
        else:
            await self._forward(owner, scope, body, receive, send)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _owner(self, scope: Scope, body: "_Body") -> int:
        """Return the process that a request belongs to; this one for whatever it will refuse."""
        here = self._owners.number
        headers = _headers(scope)
        user = self._keys.user(key_of(headers))
        if user is None or not body.is_whole:
            return here
        values = _values(body.data)
        try:
            name = addressed_request(scope["path"], values)
            name = name or session_name(_path_session(scope["path"]), headers, values)
            client = client_session(headers)
        except ValueError:
            return here
        if name is None and isinstance(response := values.get("previous_response_id"), str):
            name = request_of(response)
        name = name or user.session or client
        return self._owners.of(f"key {user.name}" if name is None else name)

    async def _forward(self, owner: int, scope: Scope, body: "_Body", receive: Receive, send: Send) -> None:
        """Pass a request on and its reply back. The end of either connection ends the other one."""
        gone = asyncio.ensure_future(_disconnected(receive))
        passing = asyncio.ensure_future(self._pass_on(owner, scope, body.data, send))
        try:
            await asyncio.wait({gone, passing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (gone, passing):
                if not task.done():
                    task.cancel()
            await asyncio.wait({gone, passing})
        if not passing.cancelled():
            passing.result()

    async def _pass_on(self, owner: int, scope: Scope, body: bytes, send: Send) -> None:
        response = await self._reached(owner, scope, body)
        if response is None:
            await _refuse(scope["path"], send)
            return
        try:
            headers = [
                (name.lower(), value)
                for name, value in response.raw_headers
                if name.lower() not in HOP_HEADERS
            ]
            await send({"type": "http.response.start", "status": response.status, "headers": headers})
            async for part in response.content.iter_any():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            response.close()

    async def _reached(self, owner: int, scope: Scope, body: bytes) -> aiohttp.ClientResponse | None:
        """Send a request to a process that may be starting. Return its reply; None: it does not come back.

        Only a request that has not reached the process is sent again.
        """
        deadline_s = asyncio.get_running_loop().time() + self._wait_s
        while asyncio.get_running_loop().time() < deadline_s:
            address = self._address_of(owner)
            if address is not None:
                try:
                    return await self._send(address, scope, body)
                except aiohttp.ClientConnectorError:
                    pass
                except (aiohttp.ClientError, OSError) as error:
                    log.warning("gateway process %d has not answered: %s", owner, error)
                    return None
            await asyncio.sleep(PAUSE_S)
        log.warning("gateway process %d was not reached within %g s", owner, self._wait_s)
        return None

    async def _send(self, address: GatewayAddress, scope: Scope, body: bytes) -> aiohttp.ClientResponse:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            )
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in HOP_HEADERS and name not in (SECRET_HEADER, b"content-length")
        ]
        query = scope["query_string"].decode("latin-1")
        path = cast(bytes, scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        return await self._session.request(
            scope["method"],
            URL(f"{address.peer}{path}" + f"?{query}" * bool(query), encoded=True),
            data=body,
            headers=[*headers, (SECRET_HEADER.decode(), address.secret)],
            allow_redirects=False,
        )


class PeersOnly:
    """An ASGI application that passes on what comes from another process of the run, and nothing else."""

    def __init__(self, application: Application, key: Key) -> None:
        self._application = application
        self._expected = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [value for name, value in scope.get("headers", ()) if name == SECRET_HEADER]
        if scope["type"] != "lifespan" and not (
            len(given) == 1 and hmac.compare_digest(given[0], self._expected)
        ):
            await _answer(send, 401, b'{"error": "this port is for the processes of the gateway"}')
            return
        await self._application(scope, receive, send)


class _Body:
    """The body of a request, which is read once and handed on."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self.is_whole = False

    @property
    def data(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self._messages)

    async def read(self, most_bytes: int) -> None:
        """Read until the end, or until more than ``most_bytes`` have come."""
        size = 0
        while size <= most_bytes:
            message = await self._receive()
            self._messages.append(message)
            if message["type"] != "http.request":
                return
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                self.is_whole = size <= most_bytes
                return

    async def again(self) -> Message:
        """Return what was read, and then what follows."""
        return self._messages.pop(0) if self._messages else await self._receive()


def _headers(scope: Scope) -> dict[str, str]:
    """Return the headers of a request; the first one of each name."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return headers


def _values(body: bytes) -> Mapping[str, object]:
    """Return the body as an object, if it may name a session; else an empty one."""
    if any(name in body for name in NAMED_IN_BODY):
        with suppress(ValueError):
            values = orjson.loads(body)
            if isinstance(values, dict):
                return cast("dict[str, object]", values)
    return {}


def _path_session(path: str) -> str | None:
    """Return the session of a path like /sessions/ID/v1/chat/completions."""
    parts = path.split("/")
    return parts[2] if len(parts) > 3 and parts[1] == "sessions" else None


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(path: str, send: Send) -> None:
    refused = Refusal(503, "the process of this conversation starts again", retry_after_s=RETRY_S)
    headers = [(name.encode(), value.encode()) for name, value in refused.headers.items()]
    protocol = protocol_of(path)
    body = orjson.dumps(error_body(refused, protocol))
    await _answer(send, words_of(refused, protocol).status, body, headers)


async def _answer(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    fields = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fields, *(headers or [])]})
    await send({"type": "http.response.body", "body": body})
