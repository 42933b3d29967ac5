"""The driver's end of the connections with gateways: one WebSocket each.

    GET  /gateway/IDENTITY    frames of ``messages`` in both directions

Every request carries the run's key. Entries go to a ``LiveTurns`` in the order of their numbers, each once;
a gateway hears which of them are durable there, and sends the rest again after a break of the connection. It
sends no more than ``WINDOW_BYTES`` without that: a slow disk slows the hand-over down and nothing else.

A gateway that does not do what it should (frames that cannot be read, numbers out of order, routing records
that it does not follow, silence) loses its connection, and may come back. What the intake raises ends the run
(``failed``).
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from typing import cast

from aiohttp import WSMsgType, web

from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.live.gateway_messages import (
    GATEWAY_UP,
    EntryHeader,
    GatewayDown,
    GatewayStatus,
    GatewayUp,
    Hello,
    crc_of_entry,
)
from slipstream.rollout.live.turns import LiveTurns
from slipstream.rollout.system.frames import (
    KEEPALIVE_S,
    LONGEST_FRAME,
    SILENCE_S,
    MalformedFrame,
    pack,
    split,
)
from slipstream.rollout.system.key import Key
from slipstream.rollout.tokens.record import CorruptRecord
from slipstream.rollout.tokens.turns import Entry, decode_entry

log = logging.getLogger(__name__)

CLOSE_S = 3.0
"""Seconds for the goodbye on a connection."""

SHUTDOWN_S = 5.0


class HandoverRefused(RuntimeError):
    """A gateway's journal and the ledger of this run do not belong together. Says why, and what to do."""


class _Connection:
    """The way to one gateway."""

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.heard_s = now
        self.welcome: int | None = None
        """What the first message is to say; None: it was sent, or the gateway has not said who it is."""
        self._due = asyncio.Event()
        self._given_up = asyncio.Event()
        self._has_routing = False

    def routing_changed(self) -> None:
        """Send the present routing record soon."""
        self._has_routing = True
        self._due.set()

    def something_durable(self) -> None:
        """Send soon which entries are durable."""
        self._due.set()

    def give_up(self) -> None:
        """End the connection soon."""
        self._given_up.set()

    async def lost(self, silence_s: float) -> None:
        """Wait until the connection is given up, or nothing was heard for ``silence_s`` seconds."""
        clock = asyncio.get_running_loop().time
        while (left := self.heard_s + silence_s - clock()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._given_up.wait()
                    return
        log.warning("%s is given up: nothing was heard of it for %g s", self.name, silence_s)

    async def send_all(
        self, socket: web.WebSocketResponse, message: Callable[[int | None, bool], GatewayDown]
    ) -> None:
        """Send until cancelled, something every KEEPALIVE_S. ``message(welcome, has_routing)`` makes it."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(KEEPALIVE_S):
                    await self._due.wait()
            self._due.clear()
            welcome, self.welcome = self.welcome, None
            has_routing, self._has_routing = self._has_routing, False
            await socket.send_bytes(pack(message(welcome, has_routing), ()))


class GatewayReceiver:
    """Serves the gateways of a run. Single event loop."""

    def __init__(
        self,
        key: Key,
        intake: LiveTurns,
        roster: EngineRoster,
        *,
        limit: int,
        silence_s: float = SILENCE_S,
    ) -> None:
        """``key``: secret of the run. ``limit``: number of requests that each gateway runs at one time."""
        self._authorization = key.header.encode()
        self._intake = intake
        self._roster = roster
        self._limit = limit
        self._silence_s = silence_s
        self._connections: dict[str, _Connection] = {}
        """By the identity of the journal."""
        self._taken: dict[str, int] = {}
        """Number of the last entry of each journal that the intake has been given."""
        self._lives = count()
        self._failure: Exception | None = None
        self._has_failed = asyncio.Event()
        self.statuses: dict[str, GatewayStatus] = {}
        """The last status of each gateway that is connected, by the identity of its journal."""
        roster.subscribe(self._routing_changed, self._lags)

    @asynccontextmanager
    async def serving(self, host: str) -> AsyncGenerator[str]:
        """Listen on ``host`` inside the block, and give the URL."""
        app = web.Application()
        app.router.add_get("/gateway/{identity}", self._connected)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, 0)
            await site.start()
            port = cast("tuple[str, int]", runner.addresses[0])[1]
            yield f"http://{host}:{port}"
        finally:
            for identity in list(self._connections):
                self._give_up(identity, self._connections[identity])
            await runner.cleanup()

    async def failed(self) -> None:
        """Wait until something has failed for a reason that is not one gateway's. Raises that."""
        await self._has_failed.wait()
        assert self._failure is not None
        raise self._failure

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            self._has_failed.set()

    def _routing_changed(self) -> None:
        for connection in self._connections.values():
            connection.routing_changed()

    def _lags(self, name: str) -> None:
        """Give up the connection with a gateway that does not follow the routing records."""
        for identity, connection in list(self._connections.items()):
            if connection.name == name:
                self._give_up(identity, connection)

    async def _connected(self, request: web.Request) -> web.WebSocketResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, self._authorization):
            raise web.HTTPUnauthorized()
        identity = request.match_info["identity"]
        if (before := self._connections.get(identity)) is not None:
            # One process at a time has the journal: the connection before has ended, unnoticed.
            self._give_up(identity, before)
        connection = _Connection(f"{identity}#{next(self._lives)}", asyncio.get_running_loop().time())
        self._connections[identity] = connection
        socket = web.WebSocketResponse(max_msg_size=LONGEST_FRAME, compress=False, timeout=CLOSE_S)
        try:
            await socket.prepare(request)
            self._roster.joined(connection.name, limit=self._limit)
            connection.routing_changed()
            await self._exchange(identity, connection, socket)
        except MalformedFrame as error:
            log.warning("%s is given up: %s", connection.name, error)
        except ConnectionError:
            pass
        except Exception as error:
            self._fail(error)
        finally:
            self._give_up(identity, connection)
            await _close(socket, request)
        return socket

    async def _exchange(self, identity: str, connection: _Connection, socket: web.WebSocketResponse) -> None:
        """Send and receive until the connection ends. Raises what handling a message raises."""
        self._welcome(identity, connection, await self._hello(identity, socket))
        name = connection.name
        message = partial(self._message, identity, name)
        tasks = {
            asyncio.create_task(self._receive(identity, connection, socket), name=f"receiving from {name}"),
            asyncio.create_task(connection.send_all(socket, message), name=f"sending to {name}"),
            asyncio.create_task(connection.lost(self._silence_s), name=f"listening to {name}"),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in done:
            if (error := task.exception()) is not None:
                raise error

    async def _hello(self, identity: str, socket: web.WebSocketResponse) -> Hello:
        """Return the first words of a gateway. Raises MalformedFrame."""
        try:
            message = await socket.receive(timeout=self._silence_s)
        except TimeoutError:
            raise MalformedFrame(f"nothing within {self._silence_s:g} s") from None
        if message.type is not WSMsgType.BINARY:
            raise MalformedFrame(f"a frame of type {message.type}")
        hello = split(cast(bytes, message.data), GATEWAY_UP)[0].hello
        if hello is None or hello.identity != identity:
            raise MalformedFrame(f"{identity} does not begin with its name")
        return hello

    def _welcome(self, identity: str, connection: _Connection, hello: Hello) -> None:
        taken = self._taken.setdefault(identity, self._intake.durable(identity))
        if hello.acknowledged > taken:
            raise HandoverRefused(
                f"the ledger of this run has the live turns of {identity} up to entry {taken}, and entries "
                f"up to {hello.acknowledged} were acknowledged and may be gone from its journal: the run "
                "folder was replaced by an older copy. Restore the newer one, or move the journal away "
                "(gateway/*.sqlite in the run folder)"
            )
        connection.welcome = taken
        connection.something_durable()

    def _message(self, identity: str, name: str, welcome: int | None, has_routing: bool) -> GatewayDown:
        return GatewayDown(
            welcome, self._intake.durable(identity), self._roster.routing_for(name) if has_routing else None
        )

    def _give_up(self, identity: str, connection: _Connection) -> None:
        """End a connection. Nothing that it brings from now on counts."""
        if self._connections.get(identity) is connection:
            del self._connections[identity]
            self.statuses.pop(identity, None)
            self._roster.left(connection.name)
        connection.give_up()

    async def _receive(self, identity: str, connection: _Connection, socket: web.WebSocketResponse) -> None:
        """Take in messages until the connection ends."""
        clock = asyncio.get_running_loop().time
        async for message in socket:
            if self._connections.get(identity) is not connection:
                return
            connection.heard_s = clock()
            if message.type is not WSMsgType.BINARY:
                raise MalformedFrame(f"a frame of type {message.type}")
            self._take(identity, connection, *split(cast(bytes, message.data), GATEWAY_UP))

    def _take(self, identity: str, connection: _Connection, message: GatewayUp, payload: memoryview) -> None:
        """Take in one message. Raises MalformedFrame."""
        if message.status is not None:
            self.statuses[identity] = message.status
            self._roster.reported(connection.name, message.status.pool)
        if not message.entries:
            return
        expected = self._taken[identity] + 1
        if message.first != expected:
            raise MalformedFrame(f"entries from number {message.first} on, expected {expected}")
        entries, chunks = _unpacked(message.first, message.entries, payload)
        self._intake.take(identity, message.first, entries, chunks)
        self._taken[identity] += len(entries)
        self._intake.when_durable(partial(self._something_durable, identity))

    def _something_durable(self, identity: str) -> None:
        connection = self._connections.get(identity)
        if connection is not None:
            connection.something_durable()


def _unpacked(
    first: int, headers: Sequence[EntryHeader], payload: memoryview
) -> tuple[list[Entry], list[memoryview]]:
    """Return the entries of a message, and the chunk of each. Raises MalformedFrame."""
    entries: list[Entry] = []
    chunks: list[memoryview] = []
    start = 0
    for number, header in enumerate(headers, first):
        chunk = payload[start : start + header.size]
        start += header.size
        if len(chunk) != header.size or crc_of_entry(number, header.kind, header.data, chunk) != header.crc:
            raise MalformedFrame(f"entry {number} was damaged on its way")
        try:
            entries.append(decode_entry(header.kind, header.data))
        except CorruptRecord as error:
            raise MalformedFrame(f"entry {number}: {error}") from error
        chunks.append(chunk)
    if start != len(payload):
        raise MalformedFrame(f"chunks of {len(payload)} bytes, expected {start}")
    return entries, chunks


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
