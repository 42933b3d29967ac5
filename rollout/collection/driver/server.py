"""The driver's end of the connections with its collectors: one WebSocket each.

    GET  /collector/NAME            frames of ``messages`` in both directions, as long as the collector lives
    POST /collector/NAME/blocked    a collector's last words: which group's workflow stands in the way

Every request carries the run's key. Messages to a collector are gathered until its connection takes them.
From a collector nothing more is read while too many bytes wait for the disk, so that TCP slows it down.

A collector that does not do what it should (frames that cannot be read, routing records that it does not
follow, silence) is given up: its work goes to others, and it begins anew under another name. What is wrong
for every collector ends the run (``failed``).
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import cast

import msgspec
from aiohttp import WSMsgType, web

from slipstream.rollout.collection.driver.assignments import Assignments
from slipstream.rollout.collection.driver.group_ledger import GroupLedger
from slipstream.rollout.collection.driver.lost_groups import LostGroups
from slipstream.rollout.collection.driver.questions import EvaluationTasks
from slipstream.rollout.collection.messages import (
    BLOCKED,
    FRAME_BYTES,
    UP,
    Assignment,
    Down,
    LostGroup,
    Question,
    Up,
)
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.routing import Routing
from slipstream.rollout.system.frames import (
    KEEPALIVE_S,
    LONGEST_FRAME,
    SILENCE_S,
    MalformedFrame,
    pack,
    split,
)
from slipstream.rollout.system.key import Key

log = logging.getLogger(__name__)

LOST_BYTES = 64 * 2**20
"""Bytes of chunks of lost groups that may wait for a connection. Further groups are left out of the log."""

BACKLOG_BYTES = 256 * 2**20
"""Payload that may wait for the disk before nothing more is read from collectors."""

LONGEST_REPORT = 2**20
"""Bytes of the report of a blocked collector."""

CLOSE_S = 3.0
"""Seconds for the goodbye on a connection."""

SHUTDOWN_S = 5.0


class CollectionFailed(RuntimeError):
    """A collector says why the run cannot go on."""


class Connection:
    """Gathers messages for one collector, and sends them in order."""

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.heard_s = now
        """When something was heard for the last time."""
        self.is_held = False
        """Nothing is read from the collector at the moment."""
        self._full: list[tuple[Down, list[bytes], int]] = []
        """Messages to which nothing more is added, with their chunks, and the bytes of those of lost
        groups."""
        self._next = Down()
        self._payload: list[bytes] = []
        self._payload_bytes = 0
        self._lost_payload: list[bytes] = []
        self._lost_bytes = 0
        """Bytes of chunks of lost groups that are not sent."""
        self._has_routing = False
        """A new routing record is to be sent."""
        self._due = asyncio.Event()
        self._given_up = asyncio.Event()

    def assign(self, assignment: Assignment, chunks: Sequence[bytes]) -> None:
        self._next.assignments.append(assignment)
        self._payload += chunks
        self._payload_bytes += sum(map(len, chunks))
        if self._payload_bytes >= FRAME_BYTES:
            self._begin_message()
        self._due.set()

    def cancel(self, group: int, assignment: int) -> None:
        self._next.cancelled.append((group, assignment))
        self._due.set()

    def ask(self, question: Question) -> None:
        self._next.questions.append(question)
        self._due.set()

    def withdraw(self, task: int) -> None:
        self._next.withdrawn.append(task)
        self._due.set()

    def log_lost(self, group: LostGroup, chunks: Sequence[bytes]) -> bool:
        """Queue a lost group for the episode log. Return False if too many bytes wait to be sent."""
        size = sum(map(len, chunks))
        if self._lost_bytes > LOST_BYTES:
            return False
        self._next.lost.append(group)
        self._lost_payload += chunks
        self._lost_bytes += size
        self._payload_bytes += size
        if self._payload_bytes >= FRAME_BYTES:
            self._begin_message()
        self._due.set()
        return True

    def evaluates_from(self, step: int) -> None:
        self._next.evaluates_from = step
        self._due.set()

    def flush(self, number: int) -> None:
        """Ask the collector to write its episode log out, after everything that was sent before."""
        self._next.flush = number
        self._begin_message()
        self._due.set()

    def routing_changed(self) -> None:
        """Send the present routing record soon."""
        self._has_routing = True
        self._due.set()

    def give_up(self) -> None:
        """End the connection soon."""
        self._given_up.set()

    async def lost(self, silence_s: float) -> None:
        """Wait until the connection is given up, or nothing was heard for ``silence_s`` seconds."""
        clock = asyncio.get_running_loop().time
        while (left := silence_s if self.is_held else self.heard_s + silence_s - clock()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._given_up.wait()
                    return
        log.warning("%s is given up: nothing was heard of it for %g s", self.name, silence_s)

    async def send_all(self, socket: web.WebSocketResponse, routing: Callable[[], Routing]) -> None:
        """Send until cancelled, something every KEEPALIVE_S. ``routing`` gives the present record."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(KEEPALIVE_S):
                    await self._due.wait()
            self._due.clear()
            self._begin_message()
            full, self._full = self._full, []
            for message, payload, lost_bytes in full:
                if self._has_routing:
                    message.routing, self._has_routing = routing(), False
                await socket.send_bytes(pack(message, payload))
                self._lost_bytes -= lost_bytes

    def _begin_message(self) -> None:
        lost = self._lost_payload
        self._full.append((self._next, self._payload + lost, sum(map(len, lost))))
        self._next, self._payload, self._payload_bytes, self._lost_payload = Down(), [], 0, []


class CollectorServer:
    """Serves the collectors of a run. Single event loop."""

    def __init__(
        self,
        key: Key,
        assignments: Assignments,
        questions: EvaluationTasks,
        roster: EngineRoster,
        ledger: GroupLedger,
        silence_s: float = SILENCE_S,
        lost: LostGroups | None = None,
    ) -> None:
        """``key``: secret of the run, which collectors show. ``silence_s``: time after which a collector is
        given up of which nothing is heard. ``lost``: has lost groups written into the episode log; None: the
        recipe asks for no log.
        """
        self._authorization = key.header.encode()
        self._assignments = assignments
        self._questions = questions
        self._roster = roster
        self._ledger = ledger
        self._silence_s = silence_s
        self._lost = lost
        self._connections: dict[str, Connection] = {}
        self._has_joined = asyncio.Event()
        self._failure: Exception | None = None
        self._has_failed = asyncio.Event()
        roster.subscribe(self._routing_changed, self._lags)

    @asynccontextmanager
    async def serving(self, host: str) -> AsyncIterator[str]:
        """Listen on ``host`` inside the block, and give the URL."""
        app = web.Application(client_max_size=LONGEST_REPORT)
        app.router.add_get("/collector/{name}", self._connected)
        app.router.add_post("/collector/{name}/blocked", self._blocked)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, 0)
            await site.start()
            port = cast("tuple[str, int]", runner.addresses[0])[1]
            yield f"http://{host}:{port}"
        finally:
            for connection in list(self._connections.values()):
                self._give_up(connection)
            await runner.cleanup()

    async def first_collector(self, timeout_s: float) -> None:
        """Wait until a collector has connected. Raises CollectionFailed after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_joined.wait()
        except TimeoutError:
            raise CollectionFailed(
                f"no collector has connected within {timeout_s:.0f} s (rollout.engine.start_timeout_s); "
                "logs/collector-*.log says how far they are"
            ) from None

    async def failed(self) -> None:
        """Wait until something has failed for a reason that is not one collector's. Raises that."""
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
        """Give up a collector that does not follow the routing records."""
        connection = self._connections.get(name)
        if connection is not None:
            self._give_up(connection)

    def _check(self, request: web.Request) -> str:
        """Return the name of the collector. Raises HTTPUnauthorized."""
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, self._authorization):
            raise web.HTTPUnauthorized()
        return request.match_info["name"]

    async def _blocked(self, request: web.Request) -> web.Response:
        name, data = self._check(request), await request.read()
        try:
            report = BLOCKED.decode(data)
        except msgspec.MsgspecError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        self._assignments.blocked(name, report.group, report.traceback)
        return web.Response()

    async def _connected(self, request: web.Request) -> web.WebSocketResponse:
        name = self._check(request)
        if name in self._connections:
            raise web.HTTPConflict(text=f"{name} is connected already")
        connection = self._connections[name] = Connection(name, asyncio.get_running_loop().time())
        socket = web.WebSocketResponse(max_msg_size=LONGEST_FRAME, compress=False, timeout=CLOSE_S)
        try:
            await socket.prepare(request)
            self._roster.joined(name)
            connection.routing_changed()
            self._assignments.joined(name, connection)
            self._questions.joined(name, connection)
            if self._lost is not None:
                self._lost.joined(name, connection)
            self._has_joined.set()
            await self._exchange(connection, socket)
        except MalformedFrame as error:
            log.warning("%s is given up: %s", name, error)
        except ConnectionError:
            pass
        except Exception as error:
            self._fail(error)
        finally:
            self._give_up(connection)
            await _close(socket, request)
        return socket

    async def _exchange(self, connection: Connection, socket: web.WebSocketResponse) -> None:
        """Send and receive until the connection ends. Raises what handling a message raises."""
        name = connection.name
        tasks = {
            asyncio.create_task(self._receive(connection, socket), name=f"receiving from {name}"),
            asyncio.create_task(
                connection.send_all(socket, lambda: self._roster.routing_for(name)), name=f"sending to {name}"
            ),
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

    def _give_up(self, connection: Connection) -> None:
        """Give the work of a collector that is gone, or that does not do what it should, to the others."""
        name = connection.name
        if self._connections.get(name) is connection:
            del self._connections[name]
            connection.give_up()
            self._roster.left(name)
            self._assignments.left(name)
            self._questions.left(name)
            if self._lost is not None:
                self._lost.left(name)

    async def _receive(self, connection: Connection, socket: web.WebSocketResponse) -> None:
        """Take in messages until the connection ends."""
        clock = asyncio.get_running_loop().time
        async for message in socket:
            connection.heard_s = clock()
            if message.type is not WSMsgType.BINARY:
                raise MalformedFrame(f"a frame of type {message.type}")
            self._take(connection.name, *split(cast(bytes, message.data), UP))
            if self._ledger.backlog > BACKLOG_BYTES:
                connection.is_held = True
                while self._ledger.backlog > BACKLOG_BYTES:
                    await self._ledger.flushed()
                connection.is_held, connection.heard_s = False, clock()

    def _take(self, name: str, message: Up, payload: memoryview) -> None:
        """Take in one message. Raises MalformedFrame, and CollectionFailed."""
        if message.fatal:
            raise CollectionFailed(f"{name}: {message.fatal}")
        if message.status is not None:
            self._roster.reported(name, message.status.pool)
        self._assignments.received(name, message, payload)
        for result in message.evaluated:
            self._questions.answered(name, result)
        if message.flushed is not None and self._lost is not None:
            self._lost.flushed(name, message.flushed)


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
