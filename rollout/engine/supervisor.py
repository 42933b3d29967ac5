"""Keeps the engines serving: starts them, notices that one is gone, starts it again, brings it up to date.

    STARTING --healthy--> SYNCING --holds the current version--> SERVING --lost / condemned--> STARTING

An engine is in the pool only while SERVING. ``sync`` brings one engine to the current version and calls
``admit`` while no publication can intervene.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from rollout.engine.client import EngineAddress, EngineClient
from rollout.engine.pool import EnginePool


class EngineGone(RuntimeError):
    """An engine has failed more often than ``rollout.engine.restarts`` allows."""


class EngineHandle(Protocol):
    """Who owns the server's process, wherever that is."""

    name: str

    async def start(self) -> EngineAddress:
        """Start, or start again, from the run's initial weights; returns when the server is healthy."""
        ...

    async def wait_exit(self) -> int: ...
    async def stop(self) -> None: ...


Sync = Callable[[EngineAddress, Callable[[], Awaitable[None]]], Awaitable[str | None]]
"""``sync(address, admit)``: None when the engine holds the current version and was admitted, else the reason."""


@dataclass
class _Engine:
    handle: EngineHandle
    condemned: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""
    restarts: int = 0


class Supervisor:
    """Single event loop. ``start`` once, then ``run`` for as long as engines are needed, then ``stop``."""

    def __init__(
        self,
        handles: Sequence[EngineHandle],
        pool: EnginePool,
        sync: Sync,
        *,
        restarts: int,
        note: Callable[[str], None],
    ) -> None:
        self._engines = {handle.name: _Engine(handle) for handle in handles}
        self._pool = pool
        self._sync = sync
        self._restarts_allowed = restarts
        self._note = note

    @property
    def restarts(self) -> int:
        """Restarts so far, all engines."""
        return sum(engine.restarts for engine in self._engines.values())

    def condemn(self, name: str, reason: str) -> None:
        """The engine may hold wrong weights, or does not answer: it is to be started again."""
        self._engines[name].reason = reason
        self._engines[name].condemned.set()

    async def run(self, serving: asyncio.Event) -> None:
        """Start all engines, set ``serving`` once every one of them serves, and keep them so.

        Never returns. Raises EngineGone, or what the first start of an engine raised.
        """
        async with asyncio.TaskGroup() as tasks:
            started = [asyncio.Event() for _ in self._engines]
            for engine, event in zip(self._engines.values(), started, strict=True):
                tasks.create_task(self._keep(engine, event))
            tasks.create_task(self._watch_pool())
            for event in started:
                await event.wait()
            serving.set()

    async def stop(self) -> None:
        """End every server."""
        await asyncio.gather(*(engine.handle.stop() for engine in self._engines.values()), return_exceptions=True)

    async def _watch_pool(self) -> None:
        while True:
            client = await self._pool.lost.get()
            self.condemn(client.name, "it does not answer")

    async def _keep(self, engine: _Engine, started: asyncio.Event) -> None:
        while True:
            engine.condemned.clear()
            client = EngineClient(await engine.handle.start())
            try:
                refused = await self._sync(client.address, lambda client=client: self._pool.add(client))
                if refused is None:
                    started.set()
                    reason = await self._lost(engine)
                else:
                    reason = f"it could not be brought to the current version: {refused}"
            finally:
                await self._pool.remove(client)
                await client.close()
            engine.restarts += 1
            if engine.restarts > self._restarts_allowed:
                raise EngineGone(f"{engine.handle.name} failed {engine.restarts} times; the last time {reason}")
            self._note(f"{engine.handle.name} is started again: {reason}")

    async def _lost(self, engine: _Engine) -> str:
        """Wait for the end of the server, or for a verdict on it; the reason."""
        exit_code = asyncio.ensure_future(engine.handle.wait_exit())
        condemned = asyncio.ensure_future(engine.condemned.wait())
        try:
            await asyncio.wait({exit_code, condemned}, return_when=asyncio.FIRST_COMPLETED)
            # A server that died is noticed by its clients first; its exit code tells more.
            with suppress(TimeoutError):
                return f"its server exited with code {await asyncio.wait_for(asyncio.shield(exit_code), 0.5)}"
            return engine.reason
        finally:
            exit_code.cancel()
            condemned.cancel()
