"""The engines that a judge process may ask: those that the newest question has named.

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
from slipstream.rollout.engine.routing import Routing
from slipstream.rollout.system.key import Key


def _key(kind: type, value: object) -> object:
    return Key(cast(str, value)) if kind is Key else value


class Askable(msgspec.Struct, array_like=True, frozen=True):
    """The engines that serve at one time."""

    policy: tuple[EngineAddress, ...] = ()
    """Empty too if no judge asks them."""
    judge: tuple[EngineAddress, ...] = ()
    """The judge's own."""


_ASKABLE = msgspec.msgpack.Decoder(Askable, dec_hook=_key)


def encoded(policy: Iterable[EngineAddress] = (), judge: Iterable[EngineAddress] = ()) -> bytes:
    """Return addresses as a question holds them."""
    return msgspec.msgpack.encode(Askable(tuple(policy), tuple(judge)), enc_hook=str)


class ServingAddresses:
    """The engines of the newest routing record, as questions hold them."""

    def __init__(self, *, asks_policy: bool = True) -> None:
        """``asks_policy``: whether judges ask the policy's engines."""
        self._asks_policy = asks_policy
        self._number = 0
        self.encoded = b""

    def follow(self, routing: Routing) -> None:
        """Take note of a routing record, unless it is older than the last one."""
        if routing.number > self._number:
            self._number = routing.number
            policy = routing.engines if self._asks_policy else ()
            self.encoded = encoded((engine.address for engine in policy), routing.judge)


class ModelEngines:
    """Clients of the engines of one model, each made when it is first used. Single event loop."""

    def __init__(
        self, whose: str = "the policy", connect: Callable[[EngineAddress], EngineClient] = EngineClient
    ) -> None:
        """``whose``: the model's name in errors."""
        self._whose = whose
        self._connect = connect
        self._addresses: tuple[EngineAddress, ...] = ()
        self._clients: dict[EngineAddress, EngineClient] = {}
        self._running: Counter[EngineAddress] = Counter()
        self._closing: set[asyncio.Task[None]] = set()

    def follow(self, addresses: tuple[EngineAddress, ...]) -> None:
        """Send requests to these engines from now on. Those that run go on."""
        self._addresses = addresses

    @property
    def addresses(self) -> tuple[EngineAddress, ...]:
        return self._addresses

    @asynccontextmanager
    async def least_loaded(self) -> AsyncIterator[EngineClient]:
        """Give the client of the engine with the fewest requests of this process. Raises EngineLost."""
        if not self._addresses:
            raise EngineLost(f"no engine of {self._whose} serves at present")
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


class ProcessEngines:
    """All engines that the code of this process may ask."""

    def __init__(self) -> None:
        self.policy = ModelEngines("the policy")
        self.judge = ModelEngines("the judge")
        self._encoded = b""

    def follow(self, addresses: bytes) -> None:
        """Send requests to these engines from now on: what ``encoded`` returns. Those that run go on."""
        if addresses != self._encoded:
            askable, self._encoded = _ASKABLE.decode(addresses), addresses
            self.policy.follow(askable.policy)
            self.judge.follow(askable.judge)


ENGINES = ProcessEngines()
"""The engines of this process."""
