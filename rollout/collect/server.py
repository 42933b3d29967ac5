"""The driver's end of the connections with its collectors: one WebSocket each.

    GET  /collector/NAME            frames of ``messages`` in both directions, as long as the collector lives
    POST /collector/NAME/blocked    a collector's last words: which group's workflow stands in the way

Every request carries the run's key. Messages to a collector are gathered until its connection takes them.
From a collector nothing more is read while too many bytes wait for the disk, so that TCP slows it down.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import cast

import msgspec
from aiohttp import WSMsgType, web

from slipstream.rollout.collect.journal import Journal
from slipstream.rollout.collect.leases import Leases
from slipstream.rollout.collect.questions import EvaluationTasks
from slipstream.rollout.engine.key import Key
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.routing import Routing
from slipstream.rollout.messages import UP, Down, Lease, MalformedFrame, Question, pack, split

log = logging.getLogger(__name__)

BACKLOG_BYTES = 256 * 2**20
"""Payload that may wait for the disk before nothing more is read from collectors."""

HEARTBEAT_S = 60.0
"""Seconds after which a silent connection has ended. A process that dies closes its connection at once; this
is for nodes and networks that die, and must not take a busy collector for a dead one."""

LONGEST_FRAME = 2**31
"""Bytes."""

LONGEST_REPORT = 2**20
"""Bytes of the report of a blocked collector."""

SHUTDOWN_S = 5.0


class CollectionFailed(RuntimeError):
    """A collector has told why the run cannot go on."""


class Connection:
    """The way to one collector: gathers messages, and sends them in order."""

    def __init__(self) -> None:
        self._next = Down()
        self._payload: list[bytes] = []
        self._has_routing = False
        """A new routing record is to be sent."""
        self._due = asyncio.Event()
        self._is_given_up = False

    def lease(self, lease: Lease, chunks: Sequence[bytes]) -> None:
        self._next.leases.append(lease)
        self._payload += chunks
        self._due.set()

    def cancel(self, group: int, lease: int) -> None:
        self._next.cancelled.append((group, lease))
        self._due.set()

    def ask(self, question: Question) -> None:
        self._next.questions.append(question)
        self._due.set()

    def withdraw(self, task: int) -> None:
        self._next.withdrawn.append(task)
        self._due.set()

    def routing_changed(self) -> None:
        """Send the present routing record soon."""
        self._has_routing = True
        self._due.set()

    def give_up(self) -> None:
        """End the connection soon."""
        self._is_given_up = True
        self._due.set()

    async def run(self, socket: web.WebSocketResponse, routing: Callable[[], Routing]) -> None:
        """Send until the connection ends, or is given up. ``routing`` gives the present record."""
        while True:
            await self._due.wait()
            self._due.clear()
            if self._is_given_up:
                await socket.close()
                return
            message, payload = self._next, self._payload
            self._next, self._payload = Down(), []
            if self._has_routing:
                message.routing, self._has_routing = routing(), False
            await socket.send_bytes(pack(message, payload))


class CollectorServer:
    """Serves the collectors of a run. Single event loop."""

    def __init__(
        self, key: Key, leases: Leases, questions: EvaluationTasks, roster: EngineRoster, journal: Journal
    ) -> None:
        """``key``: secret of the run, which collectors show."""
        self._authorization = key.header.encode()
        self._leases = leases
        self._questions = questions
        self._roster = roster
        self._journal = journal
        self._connections: dict[str, Connection] = {}
        self._has_joined = asyncio.Event()
        self._failure: asyncio.Future[None] | None = None
        roster.subscribe(self._routing_changed, self._give_up)

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
        """Wait until handling a message has failed for a reason that is not the collector's. Raises that."""
        self._failure = asyncio.get_running_loop().create_future()
        await self._failure

    def _routing_changed(self) -> None:
        for connection in self._connections.values():
            connection.routing_changed()

    def _check(self, request: web.Request) -> str:
        """Return the name of the collector. Raises HTTPUnauthorized."""
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, self._authorization):
            raise web.HTTPUnauthorized()
        return request.match_info["name"]

    async def _blocked(self, request: web.Request) -> web.Response:
        name, report = self._check(request), await request.json()
        self._leases.blocked(name, int(report["group"]), str(report["traceback"]))
        return web.Response()

    async def _connected(self, request: web.Request) -> web.WebSocketResponse:
        name = self._check(request)
        if name in self._connections:
            raise web.HTTPConflict(text=f"{name} is connected already")
        socket = web.WebSocketResponse(max_msg_size=LONGEST_FRAME, compress=False, heartbeat=HEARTBEAT_S)
        await socket.prepare(request)
        connection = self._connections[name] = Connection()
        self._roster.joined(name)
        sending = asyncio.create_task(
            connection.run(socket, lambda: self._roster.routing_for(name)), name=f"sending to {name}"
        )
        try:
            connection.routing_changed()
            self._leases.joined(name, connection)
            self._questions.joined(name, connection)
            self._has_joined.set()
            await self._receive(name, socket)
        except MalformedFrame as error:
            log.warning("%s is given up: %s", name, error)
        except ConnectionError:
            pass
        except Exception as error:
            if self._failure is not None and not self._failure.done():
                self._failure.set_exception(error)
        finally:
            self._give_up(name)
            sending.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):
                await sending
            await socket.close()
        return socket

    def _give_up(self, name: str) -> None:
        """Let others have the work of a collector that is gone, or that does not do what it is told."""
        connection = self._connections.pop(name, None)
        if connection is not None:
            connection.give_up()
            self._roster.left(name)
            self._leases.left(name)
            self._questions.left(name)

    async def _receive(self, name: str, socket: web.WebSocketResponse) -> None:
        async for message in socket:
            if name not in self._connections:
                return
            if message.type is not WSMsgType.BINARY:
                raise MalformedFrame(f"a frame of type {message.type}")
            up, payload = split(cast(bytes, message.data), UP)
            if up.fatal:
                raise CollectionFailed(f"{name}: {up.fatal}")
            if up.status is not None:
                self._roster.reported(name, up.status.pool)
            try:
                self._leases.received(name, up, payload)
            except msgspec.MsgspecError as error:
                raise MalformedFrame(str(error)) from error
            for result in up.evaluated:
                self._questions.answered(name, result)
            while self._journal.backlog > BACKLOG_BYTES:
                await self._journal.flushed()
