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
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count

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
from slipstream.rollout.live.live_turns import LiveTurns
from slipstream.rollout.system.frames import SILENCE_S, MalformedFrame, pack, split
from slipstream.rollout.system.key import Key
from slipstream.rollout.system.link import Connection, Listener
from slipstream.rollout.tokens.record import CorruptRecord
from slipstream.rollout.tokens.turn_entries import Entry, decode_entry


class HandoverRefused(RuntimeError):
    """A gateway's journal and the ledger of this run do not belong together. Says why, and what to do."""


class _GatewayConnection(Connection):
    """The way to one gateway."""

    def __init__(self, name: str, now: float) -> None:
        super().__init__(name, now)
        self.has_said_hello = False
        self.welcome: int | None = None
        """Content of the first message; None: it was sent, or the gateway has not said who it is."""
        self.has_routing = False
        """A new routing record is to be sent."""

    def routing_changed(self) -> None:
        """Send the present routing record soon."""
        self.has_routing = True
        self._due.set()

    def something_durable(self) -> None:
        """Send soon which entries are durable."""
        self._due.set()


class GatewayReceiver(Listener[_GatewayConnection]):
    """Serves the gateways of a run, by the identities of their journals. Single event loop."""

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
        super().__init__("/gateway", key, silence_s)
        self._intake = intake
        self._roster = roster
        self._limit = limit
        self._taken: dict[str, int] = {}
        """Number of the last entry of each journal that the intake has been given."""
        self._lives = count()
        self.statuses: dict[str, GatewayStatus] = {}
        """The last status of each gateway that is connected, by the identity of its journal."""
        roster.subscribe(self._routing_changed, self._lags)

    def _routing_changed(self) -> None:
        for connection in self._connections.values():
            connection.routing_changed()

    def _lags(self, name: str) -> None:
        """Give up the connection with a gateway that does not follow the routing records."""
        for identity, connection in list(self._connections.items()):
            if connection.name == name:
                self._give_up(identity, connection)

    def _accept(self, name: str) -> _GatewayConnection:
        if (before := self._connections.get(name)) is not None:
            # One process at a time has the journal: the connection before has ended, unnoticed.
            self._give_up(name, before)
        return _GatewayConnection(f"{name}#{next(self._lives)}", asyncio.get_running_loop().time())

    def _joined(self, name: str, connection: _GatewayConnection) -> None:
        self._roster.joined(connection.name, limit=self._limit)
        connection.routing_changed()

    def _left(self, name: str, connection: _GatewayConnection) -> None:
        self.statuses.pop(name, None)
        self._roster.left(connection.name)

    def _frames(self, name: str, connection: _GatewayConnection) -> Iterator[bytes]:
        if connection.has_said_hello:
            welcome, connection.welcome = connection.welcome, None
            has_routing, connection.has_routing = connection.has_routing, False
            routing = self._roster.routing_for(connection.name) if has_routing else None
            rewards = self._intake.outcomes(name)
            yield pack(GatewayDown(welcome, self._intake.durable(name), routing, rewards), ())

    async def _take(self, name: str, connection: _GatewayConnection, frame: bytes) -> None:
        """Take in one message. Raises MalformedFrame, and HandoverRefused."""
        message, payload = split(frame, GATEWAY_UP)
        if not connection.has_said_hello:
            self._welcome(name, connection, message.hello)
            return
        if message.status is not None:
            self.statuses[name] = message.status
            self._roster.reported(connection.name, message.status.pool)
        if message.entries:
            self._take_entries(name, message, payload)

    def _welcome(self, identity: str, connection: _GatewayConnection, hello: Hello | None) -> None:
        """Take in the first words of a gateway. Raises MalformedFrame, and HandoverRefused."""
        if hello is None or hello.identity != identity:
            raise MalformedFrame(f"{identity} does not begin with its name")
        taken = self._taken.setdefault(identity, self._intake.durable(identity))
        if hello.acknowledged > taken:
            raise HandoverRefused(
                f"the ledger of this run has the live turns of {identity} up to entry {taken}, and entries "
                f"up to {hello.acknowledged} were acknowledged and may be gone from its journal: the run "
                "folder was replaced by an older copy. Restore the newer one, or move the journal away "
                "(gateway/*.sqlite in the run folder)"
            )
        connection.has_said_hello, connection.welcome = True, taken
        connection.something_durable()

    def _take_entries(self, identity: str, message: GatewayUp, payload: memoryview) -> None:
        expected = self._taken[identity] + 1
        if message.first != expected:
            raise MalformedFrame(f"entries from number {message.first} on, expected {expected}")
        entries = _unpacked(message.first, message.entries, payload)
        self._intake.take(identity, message.first, entries)
        self._taken[identity] += len(entries)
        self._intake.when_durable(partial(self._something_durable, identity))

    def _something_durable(self, identity: str) -> None:
        connection = self._connections.get(identity)
        if connection is not None:
            connection.something_durable()


def _unpacked(first: int, headers: Sequence[EntryHeader], payload: memoryview) -> list[Entry]:
    """Return the entries of a message. Raises MalformedFrame."""
    entries: list[Entry] = []
    start = 0
    for number, header in enumerate(headers, first):
        chunk = payload[start : start + header.size]
        start += header.size
        if len(chunk) != header.size or crc_of_entry(number, header.kind, header.data, chunk) != header.crc:
            raise MalformedFrame(f"entry {number} was damaged on its way")
        try:
            entries.append(decode_entry(header.kind, header.data, chunk))
        except CorruptRecord as error:
            raise MalformedFrame(f"entry {number}: {error}") from error
    if start != len(payload):
        raise MalformedFrame(f"chunks of {len(payload)} bytes, expected {start}")
    return entries
