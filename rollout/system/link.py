"""Links: one WebSocket between two of our processes, in the frames of ``system.frames``.

    Listener: GET PATH/NAME ─► Connection ◄──frames──► OutgoingLink ◄─ connected

The driver listens, and many connect. Every request carries the run's key. A side that hears nothing for
SILENCE_S ends the link, and so does the end of a process. What a link has lost, its two sides know how to
send again: nothing is kept here.
"""

import asyncio
import hmac
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Generic, TypeVar, cast

import aiohttp
import msgspec
from aiohttp import WSMsgType, web

from slipstream.rollout.system.frames import (
    KEEPALIVE_S,
    LONGEST_FRAME,
    SILENCE_S,
    MalformedFrame,
    Message,
    pack,
    split,
)
from slipstream.rollout.system.key import Key

log = logging.getLogger(__name__)

CLOSE_S = 3.0
"""Seconds for the goodbye on a connection."""

SHUTDOWN_S = 5.0

CONNECT_S, HANDSHAKE_S = 30.0, 300.0
"""Seconds until the listening machine must have taken a connection, and until it must have answered."""

LONGEST_REQUEST = 2**20
"""Bytes of a request beside the connections."""


class Connection:
    """The listening side of one link."""

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.heard_s = now
        """When something was heard for the last time."""
        self._is_held = False
        self._due = asyncio.Event()
        self._given_up = asyncio.Event()

    @property
    def is_given_up(self) -> bool:
        return self._given_up.is_set()

    def give_up(self) -> None:
        """End the connection soon. Nothing that it brings from now on counts."""
        self._given_up.set()

    @contextmanager
    def held(self) -> Generator[None]:
        """Inside the block nothing is read from the other side, so that its silence says nothing."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held, self.heard_s = False, asyncio.get_running_loop().time()

    async def due(self) -> None:
        """Wait until there is something to send, for KEEPALIVE_S at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(KEEPALIVE_S):
                await self._due.wait()
        self._due.clear()

    async def lost(self, silence_s: float) -> None:
        """Wait until the connection is given up, or nothing was heard for ``silence_s`` seconds."""
        clock = asyncio.get_running_loop().time
        while (left := silence_s if self._is_held else self.heard_s + silence_s - clock()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._given_up.wait()
                    return
        log.warning("%s is given up: nothing was heard of it for %g s", self.name, silence_s)


C = TypeVar("C", bound=Connection)


class Listener(ABC, Generic[C]):
    """Serves the connecting sides of links. Single event loop.

    A side that does not do what it should (MalformedFrame, silence) loses its connection. Any other error of
    what a subclass does ends the run (``failed``).
    """

    def __init__(
        self, path: str, key: Key, silence_s: float = SILENCE_S, routes: Sequence[web.RouteDef] = ()
    ) -> None:
        """``key``: secret of the run. ``silence_s``: time after which a side is given up of which nothing is
        heard. ``routes``: what is served besides the connections.
        """
        self._routes = [web.get(f"{path}/{{name}}", self._connected), *routes]
        self._authorization = key.header.encode()
        self._silence_s = silence_s
        self._connections: dict[str, C] = {}
        """By the name in the address."""
        self._failure: Exception | None = None
        self._has_failed = asyncio.Event()

    # -- What a subclass does

    @abstractmethod
    def _accept(self, name: str) -> C:
        """Return the new connection of ``name``. Raises HTTPConflict."""

    @abstractmethod
    def _joined(self, name: str, connection: C) -> None:
        """Take note of a connection that is open."""

    @abstractmethod
    def _left(self, name: str, connection: C) -> None:
        """Take note of a connection that has ended, or is given up. It may not have been open."""

    @abstractmethod
    def _frames(self, name: str, connection: C) -> Iterable[bytes]:
        """Return what is to be sent now, each made when the one before was sent."""

    @abstractmethod
    async def _take(self, name: str, connection: C, frame: bytes) -> None:
        """Take in a frame. Nothing more is read before this returns. Raises MalformedFrame."""

    # -- Serving

    @asynccontextmanager
    async def serving(self, host: str) -> AsyncGenerator[str]:
        """Listen on ``host`` inside the block, and give the URL."""
        app = web.Application(client_max_size=LONGEST_REQUEST)
        app.router.add_routes(self._routes)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, 0)
            await site.start()
            port = cast("tuple[str, int]", runner.addresses[0])[1]
            yield f"http://{host}:{port}"
        finally:
            for name, connection in list(self._connections.items()):
                self._give_up(name, connection)
            await runner.cleanup()

    async def failed(self) -> None:
        """Wait until something has failed for a reason that is not one connection's. Raises that."""
        await self._has_failed.wait()
        assert self._failure is not None
        raise self._failure

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            self._has_failed.set()

    def _checked(self, request: web.Request) -> str:
        """Return the name in a request's address. Raises HTTPUnauthorized."""
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, self._authorization):
            raise web.HTTPUnauthorized()
        return request.match_info["name"]

    def _give_up(self, name: str, connection: C) -> None:
        """End a connection, unless another one has taken its place."""
        if self._connections.get(name) is connection:
            del self._connections[name]
            connection.give_up()
            self._left(name, connection)

    async def _connected(self, request: web.Request) -> web.WebSocketResponse:
        name = self._checked(request)
        connection = self._connections[name] = self._accept(name)
        socket = web.WebSocketResponse(max_msg_size=LONGEST_FRAME, compress=False, timeout=CLOSE_S)
        try:
            await socket.prepare(request)
            self._joined(name, connection)
            await until_one_ends(
                {
                    f"receiving from {connection.name}": self._receive(name, connection, socket),
                    f"sending to {connection.name}": self._send(name, connection, socket),
                    f"listening to {connection.name}": connection.lost(self._silence_s),
                }
            )
        except MalformedFrame as error:
            log.warning("%s is given up: %s", connection.name, error)
        except ConnectionError:
            pass
        except Exception as error:
            self._fail(error)
        finally:
            self._give_up(name, connection)
            await _close(socket, request)
        return socket

    async def _receive(self, name: str, connection: C, socket: web.WebSocketResponse) -> None:
        """Take in frames until the connection ends."""
        clock = asyncio.get_running_loop().time
        async for message in socket:
            if connection.is_given_up:
                return
            connection.heard_s = clock()
            if message.type is not WSMsgType.BINARY:
                raise MalformedFrame(f"a frame of type {message.type}")
            await self._take(name, connection, cast(bytes, message.data))

    async def _send(self, name: str, connection: C, socket: web.WebSocketResponse) -> None:
        """Send until cancelled, something every KEEPALIVE_S."""
        while True:
            await connection.due()
            for frame in self._frames(name, connection):
                await socket.send_bytes(frame)


async def _close(socket: web.WebSocketResponse, request: web.Request) -> None:
    """Say goodbye, and close the connection whether or not it is answered."""
    try:
        async with asyncio.timeout(CLOSE_S):
            if socket.prepared:
                await socket.close()
    except (TimeoutError, ConnectionError):
        pass
    finally:
        if request.transport is not None:
            request.transport.abort()


class LinkEnded(Exception):
    """The driver is gone, or has given this side up."""


class OutgoingLink:
    """The connecting side of one link."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, silence_s: float) -> None:
        self._socket = socket
        self._silence_s = silence_s

    async def send(self, message: msgspec.Struct, payload: Sequence[bytes] = ()) -> None:
        """Send a message. Raises ConnectionError."""
        await self._socket.send_bytes(pack(message, payload))

    async def receive(self, decoder: "msgspec.msgpack.Decoder[Message]") -> tuple[Message, memoryview]:
        """Return the next message and its payload. Raises LinkEnded and MalformedFrame."""
        try:
            message = await self._socket.receive(timeout=self._silence_s)
        except TimeoutError:
            raise LinkEnded(f"nothing was heard of the driver for {self._silence_s:g} s") from None
        if message.type is not WSMsgType.BINARY:
            raise LinkEnded("the driver has closed the connection")
        return split(cast(bytes, message.data), decoder)


@asynccontextmanager
async def connected(
    url: str, path: str, key: Key, silence_s: float = SILENCE_S
) -> AsyncGenerator[OutgoingLink]:
    """Give the link with the listening side at ``url``. Raises aiohttp.ClientError, OSError, TimeoutError."""
    timeout = aiohttp.ClientTimeout(HANDSHAKE_S, sock_connect=CONNECT_S)
    headers = {"Authorization": key.header}
    async with (
        aiohttp.ClientSession(url, headers=headers, timeout=timeout) as session,
        session.ws_connect(path, max_msg_size=LONGEST_FRAME, compress=0) as socket,
    ):
        yield OutgoingLink(socket, silence_s)


async def until_one_ends(coroutines: Mapping[str, Coroutine[object, object, None]]) -> None:
    """Run coroutines, by their names, until one of them ends, and cancel the others. Raises its error."""
    tasks = {asyncio.create_task(coroutine, name=name) for name, coroutine in coroutines.items()}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in done:
        if (error := task.exception()) is not None:
            raise error
