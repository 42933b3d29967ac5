"""Who has the GPUs: trainer and engines each their own, or one of them at a time the same ones.

Colocated, the engines generate while the trainer's state is in host memory. For a training step they stop,
and give up their memory too:

    engines | generate | give all up |             | take weights |       | take all | generate
    trainer | rests    |             | wakes, trains, keeps weights | sends | rests    | rests

Their weights come back as they were (SGLang keeps them on the host), so that a turn of the trainer's need not
end in a new version. A step of an engine's that fails costs that engine, never the turn.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from slipstream.backend.checkpoint.errors import CheckpointError
from slipstream.backend.driver.trainer_client import Trainer
from slipstream.bridge.endpoint import Pause, told
from slipstream.rollout.changes import Changes
from slipstream.rollout.collect.time_limit import TimeLimit
from slipstream.rollout.engine.client import EngineAddress, EngineClient, EngineMemory
from slipstream.rollout.engine.pool import EnginePool

ALL_MEMORY: Sequence[EngineMemory] = ("weights", "kv_cache", "cuda_graph")
WEIGHTS: Sequence[EngineMemory] = ("weights",)


@dataclass
class Turn:
    """The trainer's time at the devices."""

    stood_s: float = 0.0
    """How long the engines stood still for it; known at its end."""


class Devices(Protocol):
    shared: bool

    def starting(self) -> AbstractAsyncContextManager[None]:
        """While an engine is being started."""
        ...

    def training(self, *newcomers: EngineAddress) -> AbstractAsyncContextManager[Turn]:
        """While the trainer computes. ``newcomers``: engines that run, and are not in the pool yet."""
        ...

    def publishing(self) -> AbstractAsyncContextManager[None]:
        """Within ``training``: while weights go to the engines. Only weights are on the devices then."""
        ...


class Separate:
    """Trainer and engines have devices of their own."""

    shared = False

    def __init__(self, pool: EnginePool, *, drain_s: float | None = None) -> None:
        """``drain_s``: wait so long for the running requests before a version is published."""
        self._pool = pool
        self._drain_s = drain_s

    def starting(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def training(self, *newcomers: EngineAddress) -> AbstractAsyncContextManager[Turn]:
        return nullcontext(Turn())

    def publishing(self) -> AbstractAsyncContextManager[None]:
        return self._pool.drained(self._drain_s) if self._drain_s is not None else nullcontext()


class Colocated:
    """Trainer and engines take turns on the same devices. The engines have them first, once the trainer was
    there to start. Single event loop.
    """

    shared = True

    def __init__(
        self,
        trainer: Trainer,
        pool: EnginePool,
        *,
        pause: Pause,
        drain_s: float | None,
        timeout_s: float,
        episodes: TimeLimit,
    ) -> None:
        """``pause``: what becomes of running requests, those that outlast ``drain_s`` if it is given.

        ``timeout_s``: longest time for an engine to stop, to give its memory up or to take it back.
        ``episodes``: a limit that does not count the trainer's turns.
        """
        self._trainer = trainer
        self._pool = pool
        self._pause: Pause = pause
        self._drain_s = drain_s
        self._timeout_s = timeout_s
        self._episodes = episodes
        self._one = asyncio.Lock()
        self._trainer_rests = False
        self._has_rested = False
        self._starting = 0
        self._changes = Changes()
        self._standing: list[EngineClient] = []
        """Engines that stand still for the turn that is on, and have what is ``_away`` still to come."""
        self._away: Sequence[EngineMemory] = ()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        await self._changes.first(lambda: True if self._trainer_rests else None)
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1
            self._changes.notify()

    @asynccontextmanager
    async def training(self, *newcomers: EngineAddress) -> AsyncIterator[Turn]:
        async with self._one, AsyncExitStack() as stack:
            self._trainer_rests = False  # so that no further engine starts
            await self._changes.first(lambda: True if not self._starting else None)
            if self._drain_s is not None:
                await stack.enter_async_context(self._pool.drained(self._drain_s))
            stack.enter_context(self._episodes.stopped())
            new = [await stack.enter_async_context(EngineClient(address)) for address in newcomers]
            clock = asyncio.get_running_loop().time
            turn, began = Turn(), clock()
            await self._stop(new)
            try:
                yield turn
            except CheckpointError:  # whatever else it is ends the run
                await self._go_on(new)
                raise
            await self._go_on(new)
            turn.stood_s = clock() - began

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        await self._trainer.rest(keep_weights=True)
        await self._each("regain weights", lambda engine: engine.regain_memory(WEIGHTS))
        self._away = [memory for memory in ALL_MEMORY if memory not in WEIGHTS]
        yield

    async def _stop(self, newcomers: Sequence[EngineClient]) -> None:
        self._standing, self._away = [*self._pool.clients, *newcomers], ALL_MEMORY
        await self._each("pause", lambda engine: engine.pause(self._pause))
        await self._each("release", lambda engine: engine.release_memory(ALL_MEMORY))
        if self._has_rested:
            await self._trainer.wake()

    async def _go_on(self, newcomers: Sequence[EngineClient]) -> None:
        await self._trainer.rest()
        self._has_rested = True
        # Those that the pool has lost meanwhile may hold a mixture of two versions: they stay as they are.
        whole = {*self._pool.clients, *newcomers}
        self._standing = [engine for engine in self._standing if engine in whole]
        await self._each("regain", lambda engine: engine.regain_memory(self._away))
        await self._each("resume", lambda engine: engine.resume())
        self._trainer_rests = True
        self._changes.notify()

    async def _each(self, step: str, call: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Do one step on every engine that stands, at once. One that fails it is given up."""

        async def attempt(engine: EngineClient) -> str | None:
            try:
                await asyncio.wait_for(call(engine), self._timeout_s)
            except TimeoutError:
                return f"{step}: no answer in {self._timeout_s:g} s"
            except Exception as error:  # whatever a client raises, the engine is out and the others go on
                return f"{step}: {told(error)}"
            return None

        failures = await asyncio.gather(*map(attempt, self._standing))
        for engine, reason in zip(self._standing, failures, strict=True):
            if reason is not None:
                await self._pool.condemn(engine, reason)
        self._standing = [
            engine for engine, reason in zip(self._standing, failures, strict=True) if reason is None
        ]
