"""The gateway's end of its connection with the driver: entries up, acknowledgements and routing records down.

    journal ──read──► at most WINDOW_BYTES on their way ──► driver
    journal ◄──acknowledge── durable numbers, routing records ──► engine pool

A gateway does not need the driver to serve. Without a connection it goes on with the last routing record, its
journal grows, and it looks for the driver again and again: in the file where drivers write where they listen.
Weights that are published meanwhile may be in doubt, so that answers from them wait for the next record.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import aiohttp

from slipstream.rollout.engine.engine_pool import EnginePool
from slipstream.rollout.gateway.journal import TurnJournal
from slipstream.rollout.gateway.journal_file import Row
from slipstream.rollout.live.driver_address import DriverAddress
from slipstream.rollout.live.gateway_messages import (
    FRAME_BYTES,
    GATEWAY_DOWN,
    STATUS_EVERY_S,
    WINDOW_BYTES,
    EntryHeader,
    GatewayStatus,
    GatewayUp,
    Hello,
)
from slipstream.rollout.system.changes import Changes
from slipstream.rollout.system.frames import SILENCE_S, MalformedFrame
from slipstream.rollout.system.link import LinkEnded, OutgoingLink, connected, until_one_ends

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Times between two attempts to reach the driver."""


class DriverLink:
    """Hands the journal over to the driver. Single event loop."""

    def __init__(
        self,
        journal: TurnJournal,
        pool: EnginePool,
        find: Callable[[], DriverAddress | None],
        silence_s: float = SILENCE_S,
    ) -> None:
        """``find``: returns where the driver listens; asked before every attempt."""
        self._journal = journal
        self._pool = pool
        self._find = find
        self._silence_s = silence_s
        self._report = asyncio.Event()
        self.connected = asyncio.Event()
        """Set while the driver takes entries."""
        self.disconnected = asyncio.Event()
        """Set at all other times."""
        self.disconnected.set()
        self.connections = 0
        """Number of connections so far."""

    def report(self) -> None:
        """Send the status soon, although nothing else has happened."""
        self._report.set()

    async def run(self) -> None:
        """Stay connected with the driver. Ends by cancellation only. Raises JournalError."""
        pause_s = FIRST_PAUSE_S
        while True:
            began = self.connections
            try:
                await self._connection()
            except (LinkEnded, MalformedFrame, aiohttp.ClientError, OSError, TimeoutError) as error:
                log.info("no connection with the driver: %s", error)
            finally:
                self._pool.lose_touch()
                self.connected.clear()
                self.disconnected.set()
            pause_s = FIRST_PAUSE_S if self.connections > began else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _connection(self) -> None:
        """Connect, and exchange messages until the connection ends, which raises an error of its own."""
        address = self._find()
        if address is None:
            raise LinkEnded("no driver has said where it listens")
        path = f"/gateway/{self._journal.identity}"
        async with connected(address.url, path, address.key, self._silence_s) as link:
            await self._exchange(link)

    async def _exchange(self, link: OutgoingLink) -> None:
        journal = self._journal
        hello = Hello(journal.identity, journal.durable_number, journal.acknowledged)
        await link.send(GatewayUp(hello=hello))
        window = _Window()
        welcome = await self._next(link, window)
        if welcome is None:
            raise MalformedFrame("the driver does not begin with a welcome")
        # Also where the journal is older than the ledger, which this is the moment to notice.
        if welcome > journal.durable_number:
            journal.acknowledge(welcome)
        self.connections += 1
        self.connected.set()
        self.disconnected.clear()
        await until_one_ends(
            {
                "hearing the driver": self._receive(link, window),
                "handing over": self._hand_over(link, window, welcome),
                "telling the driver": self._tell(link),
            }
        )

    async def _hand_over(self, link: OutgoingLink, window: "_Window", after: int) -> None:
        """Send the entries after number ``after``, in order, forever."""
        while True:
            await window.room()
            rows = await self._journal.read(after, FRAME_BYTES)
            if not rows:
                await self._journal.grown(after)
                continue
            if rows[0].number != after + 1:
                raise LinkEnded(f"entry {after + 1} is not in the journal any more")
            after = rows[-1].number
            window.sent(after, sum(len(row.data) + len(row.chunk) for row in rows))
            await link.send(_message(rows), [row.chunk for row in rows])

    async def _tell(self, link: OutgoingLink) -> None:
        """Send the status once a second, and sooner when there is a reason."""
        while True:
            self._report.clear()
            status = GatewayStatus(self._pool.status(), self._journal.last, self._journal.acknowledged)
            await link.send(GatewayUp(status=status))
            with suppress(TimeoutError):
                async with asyncio.timeout(STATUS_EVERY_S):
                    await self._report.wait()

    async def _receive(self, link: OutgoingLink, window: "_Window") -> None:
        while True:
            await self._next(link, window)

    async def _next(self, link: OutgoingLink, window: "_Window") -> int | None:
        """Take in the next message, and return its welcome. Raises LinkEnded and MalformedFrame."""
        down, _ = await link.receive(GATEWAY_DOWN)
        if down.routing is not None:
            self._pool.follow(down.routing)
        self._journal.acknowledge(down.durable)
        self._journal.rewarded(down.rewards)
        window.acknowledged(down.durable)
        return down.welcome


class _Window:
    """The entries that were sent and are not acknowledged."""

    def __init__(self) -> None:
        self._frames: deque[tuple[int, int]] = deque()
        """(last number, bytes) of each frame."""
        self._bytes = 0
        self._changes = Changes()

    def sent(self, last: int, size: int) -> None:
        self._frames.append((last, size))
        self._bytes += size

    def acknowledged(self, number: int) -> None:
        while self._frames and self._frames[0][0] <= number:
            self._bytes -= self._frames.popleft()[1]
        self._changes.notify()

    async def room(self) -> None:
        """Wait until more may be sent. The end of the connection ends the wait."""
        await self._changes.first(lambda: True if self._bytes < WINDOW_BYTES else None)


def _message(rows: list[Row]) -> GatewayUp:
    headers = [EntryHeader(row.kind, row.data, len(row.chunk), row.crc) for row in rows]
    return GatewayUp(first=rows[0].number, entries=headers)
