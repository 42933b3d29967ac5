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
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
from aiohttp import web

from slipstream.rollout.collection.driver.assignments import Assignments
from slipstream.rollout.collection.driver.group_ledger import GroupLedger
from slipstream.rollout.collection.driver.lost_groups import LostGroups
from slipstream.rollout.collection.driver.questions import EvaluationTasks
from slipstream.rollout.collection.messages import (
    BLOCKED,
    FAILED,
    FRAME_BYTES,
    UP,
    Assignment,
    Down,
    LostGroup,
    Question,
)
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.routing import Routing
from slipstream.rollout.system.frames import SILENCE_S, pack, split
from slipstream.rollout.system.key import Key
from slipstream.rollout.system.link import Connection, Listener

LOST_BYTES = 64 * 2**20
"""Bytes of chunks of lost groups that may wait for a connection. Further groups are left out of the log."""

BACKLOG_BYTES = 256 * 2**20
"""Payload that may wait for the disk before nothing more is read from collectors."""


class CollectionFailed(RuntimeError):
    """A collector says why the run cannot go on."""


class CollectorConnection(Connection):
    """Gathers messages for one collector, and sends them in order."""

    def __init__(self, name: str, now: float) -> None:
        super().__init__(name, now)
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

    def frames(self, routing: Callable[[], Routing]) -> Iterator[bytes]:
        """Yield what is gathered. ``routing`` gives the present record."""
        self._begin_message()
        full, self._full = self._full, []
        for message, payload, lost_bytes in full:
            if self._has_routing:
                message.routing, self._has_routing = routing(), False
            yield pack(message, payload)
            self._lost_bytes -= lost_bytes

    def _begin_message(self) -> None:
        lost = self._lost_payload
        self._full.append((self._next, self._payload + lost, sum(map(len, lost))))
        self._next, self._payload, self._payload_bytes, self._lost_payload = Down(), [], 0, []


class CollectorServer(Listener[CollectorConnection]):
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
        """``key``, ``silence_s``: as of ``Listener``. ``lost``: has lost groups written into the episode log;
        None: the recipe asks for no log.
        """
        super().__init__("/collector", key, silence_s, [web.post("/collector/{name}/blocked", self._blocked)])
        self._assignments = assignments
        self._questions = questions
        self._roster = roster
        self._ledger = ledger
        self._lost = lost
        self._has_joined = asyncio.Event()
        self._progressed: set[str] = set()
        roster.subscribe(self._routing_changed, self._lags)

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

    def has_progressed(self, name: str) -> bool:
        """True if a collector has finished a group that did not fail, or an evaluation episode, or has named
        the group that stops it, which is charged with that.
        """
        return name in self._progressed

    def _routing_changed(self) -> None:
        for connection in self._connections.values():
            connection.routing_changed()

    def _lags(self, name: str) -> None:
        """Give up a collector that does not follow the routing records."""
        if (connection := self._connections.get(name)) is not None:
            self._give_up(name, connection)

    async def _blocked(self, request: web.Request) -> web.Response:
        name, data = self._checked(request), await request.read()
        try:
            report = BLOCKED.decode(data)
        except msgspec.MsgspecError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        if report.group is not None:
            self._progressed.add(name)
        self._assignments.blocked(name, report.group, report.traceback)
        return web.Response()

    def _accept(self, name: str) -> CollectorConnection:
        if name in self._connections:
            raise web.HTTPConflict(text=f"{name} is connected already")
        return CollectorConnection(name, asyncio.get_running_loop().time())

    def _joined(self, name: str, connection: CollectorConnection) -> None:
        self._roster.joined(name)
        connection.routing_changed()
        self._assignments.joined(name, connection)
        self._questions.joined(name, connection)
        if self._lost is not None:
            self._lost.joined(name, connection)
        self._has_joined.set()

    def _left(self, name: str, connection: CollectorConnection) -> None:
        """Give the work of a collector that is gone, or that does not do what it should, to the others."""
        self._roster.left(name)
        self._assignments.left(name)
        self._questions.left(name)
        if self._lost is not None:
            self._lost.left(name)

    def _frames(self, name: str, connection: CollectorConnection) -> Iterator[bytes]:
        return connection.frames(partial(self._roster.routing_for, name))

    async def _take(self, name: str, connection: CollectorConnection, frame: bytes) -> None:
        """Take in one message. Raises MalformedFrame, and CollectionFailed."""
        message, payload = split(frame, UP)
        if message.fatal:
            raise CollectionFailed(f"{name}: {message.fatal}")
        if message.status is not None:
            self._roster.reported(name, message.status.pool)
        self._assignments.received(name, message, payload)
        if message.evaluated or any(verdict.verdict != FAILED for verdict in message.verdicts):
            self._progressed.add(name)
        for result in message.evaluated:
            self._questions.answered(name, result)
        if message.flushed is not None and self._lost is not None:
            self._lost.flushed(name, message.flushed)
        if self._ledger.backlog > BACKLOG_BYTES:
            with connection.held():
                while self._ledger.backlog > BACKLOG_BYTES:
                    await self._ledger.flushed()
