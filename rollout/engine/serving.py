"""The policy's engines as a judge process knows them: those that the newest question has named.

A judge process has no connection with the driver. Each question brings the addresses of the engines that
serve at that time, so that nothing has to be sent when an engine is restarted.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import cast

import msgspec

from slipstream.rollout.engine.client import EngineClient, EngineLost
from slipstream.rollout.engine.connection import EngineAddress
from slipstream.rollout.engine.key import Key
from slipstream.rollout.engine.routing import Routing


def _key(kind: type, value: object) -> object:
    return Key(cast(str, value)) if kind is Key else value


_ADDRESSES = msgspec.msgpack.Decoder(tuple[EngineAddress, ...], dec_hook=_key)


def encoded(addresses: Iterable[EngineAddress]) -> bytes:
    """Return addresses as a question holds them."""
    return msgspec.msgpack.encode(tuple(addresses), enc_hook=str)


class ServingAddresses:
    """The engines of the newest routing record, as questions hold them."""

    def __init__(self) -> None:
        self._number = 0
        self.encoded = b""

    def follow(self, routing: Routing) -> None:
        """Take note of a routing record, unless it is older than the last one."""
        if routing.number > self._number:
            self._number = routing.number
            self.encoded = encoded(engine.address for engine in routing.engines)


class PolicyEngines:
    """Clients of the engines that serve, each made when it is first used. Single event loop."""

    def __init__(self, connect: Callable[[EngineAddress], EngineClient] = EngineClient) -> None:
        self._connect = connect
        self._addresses: tuple[EngineAddress, ...] = ()
        self._encoded = b""
        self._clients: dict[EngineAddress, EngineClient] = {}
        self._running: Counter[EngineAddress] = Counter()
        self._closing: set[asyncio.Task[None]] = set()

    def follow(self, addresses: bytes) -> None:
        """Send requests to these engines from now on: what ``encoded`` returns. Those that run go on."""
        if addresses != self._encoded:
            self._addresses, self._encoded = _ADDRESSES.decode(addresses), addresses

    @property
    def addresses(self) -> tuple[EngineAddress, ...]:
        return self._addresses

    @asynccontextmanager
    async def least_loaded(self) -> AsyncIterator[EngineClient]:
        """Give the client of the engine with the fewest requests of this process. Raises EngineLost."""
        if not self._addresses:
            raise EngineLost("no engine of the policy serves at present")
        self._close_unused()
        address = min(self._addresses, key=lambda each: self._running[each])
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = self._connect(address)
        self._running[address] += 1
        try:
            yield client
        finally:
            self._running[address] -= 1

    def _close_unused(self) -> None:
        """Close the clients of engines that serve no more and have no request."""
        for address in [each for each in self._clients if each not in self._addresses]:
            if not self._running[address]:
                del self._running[address]
                closing = asyncio.create_task(self._clients.pop(address).close(), name="closing an engine")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all clients. Their requests end."""
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.close()


ENGINES = PolicyEngines()
"""The engines of this process."""
