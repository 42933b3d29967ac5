"""Decides who has the GPUs: trainer and engines have their own, work beside each other on the same ones, or
take turns on them.

Colocated engines generate while the trainer's state is in host memory. For a training step they stop and give
their memory up:

    engines | generate | release all |               | regain weights |       | regain all | generate
    trainer | rests    |             | wakes, trains |                | sends | rests      | rests

SGLang keeps an engine's weights on the host meanwhile, so that a turn of the trainer may also end without a
new version. An engine that fails a step of this protocol is condemned; the turn goes on. A trainer that fails
is killed, which ends its turn: the engines regain their memory and go on. It starts again in its own turn.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.driver.ports import RunTrainer
from slipstream.bridge.publish.endpoint import Pause, error_text
from slipstream.rollout.engine.client import EngineAddress, EngineClient, EngineMemory
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.system.changes import Changes

ALL_MEMORY: Sequence[EngineMemory] = ("weights", "kv_cache", "cuda_graph")
WEIGHTS: Sequence[EngineMemory] = ("weights",)


@dataclass
class TrainerTurn:
    """One period in which the trainer computes."""

    stood_s: float = 0.0
    """Seconds for which the engines stood still because of it. Known at its end."""


class Devices(Protocol):
    """Gives the devices to the trainer or to the engines, as they need them."""

    @property
    def shared(self) -> bool:
        """Trainer and engines take turns."""
        ...

    def starting(self) -> AbstractAsyncContextManager[None]:
        """Give the devices to an engine that starts inside the block."""
        ...

    def trainer_gone(self) -> None:
        """Note that the trainer was killed: its next turn is that of a new one. No turn is under way."""
        ...

    def training(self, *newcomers: EngineAddress) -> AbstractAsyncContextManager[TrainerTurn]:
        """Give the devices to the trainer inside the block. ``newcomers``: engines not in the roster yet."""
        ...

    def publishing(self) -> AbstractAsyncContextManager[None]:
        """Make the engines ready to receive weights inside the block, which lies within ``training``."""
        ...


class Separate:
    """Trainer and engines have devices of their own."""

    shared = False

    def __init__(self, publishing: Callable[[], AbstractAsyncContextManager[None]] = nullcontext) -> None:
        """``publishing``: what surrounds a publication, such as draining the engines."""
        self._publishing = publishing

    def starting(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def trainer_gone(self) -> None:
        """Do nothing."""

    def training(self, *newcomers: EngineAddress) -> AbstractAsyncContextManager[TrainerTurn]:
        return nullcontext(TrainerTurn())

    def publishing(self) -> AbstractAsyncContextManager[None]:
        return self._publishing()


class Beside(Separate):
    """Trainer and engines work on the same devices at the same time. Single event loop.

    The trainer starts first and takes the memory of its largest step, because SGLang sizes its KV cache by
    what is free at its start. Engines also need the ids of the trainer's GPUs, which are known then.
    """

    def __init__(
        self,
        trainer: RunTrainer,
        publishing: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(publishing)
        self._trainer = trainer
        self._has_shown_peak = False
        self._changes = Changes()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        await self._changes.first(lambda: True if self._has_shown_peak else None)
        yield

    def trainer_gone(self) -> None:
        self._has_shown_peak = False

    @asynccontextmanager
    async def training(self, *newcomers: EngineAddress) -> AsyncIterator[TrainerTurn]:
        yield TrainerTurn()
        if not self._has_shown_peak:
            await self._trainer.show_peak()
            self._has_shown_peak = True
            self._changes.notify()


class Colocated:
    """Trainer and engines take turns on the same devices. The trainer starts first. Single event loop."""

    shared = True

    def __init__(
        self,
        trainer: RunTrainer,
        roster: EngineRoster,
        *,
        pause: Pause,
        drain_s: float | None,
        timeout_s: float,
    ) -> None:
        """``pause``: what a stop does to requests that run, with ``drain_s`` to those that outlast it.

        ``timeout_s``: longest time for an engine to stop, to release its memory or to regain it.
        """
        self._trainer = trainer
        self._roster = roster
        self._pause: Pause = pause
        self._drain_s = drain_s
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._trainer_rests = False
        self._has_rested = False
        self._starting = 0
        self._changes = Changes()
        self._standing: list[EngineClient] = []
        """Engines that stand still during the present turn and have yet to regain ``_away``."""
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

    def trainer_gone(self) -> None:
        self._has_rested = False

    @asynccontextmanager
    async def training(self, *newcomers: EngineAddress) -> AsyncIterator[TrainerTurn]:
        async with self._turn, AsyncExitStack() as stack:
            self._trainer_rests = False  # so that no further engine starts
            await self._changes.first(lambda: True if not self._starting else None)
            # Collectors stop the clocks of their episodes while requests are held.
            if self._drain_s is not None:
                await stack.enter_async_context(self._roster.drained(self._drain_s))
            else:
                stack.enter_context(self._roster.holding())
            new = [await stack.enter_async_context(EngineClient(address)) for address in newcomers]
            clock = asyncio.get_running_loop().time
            turn, began = TrainerTurn(), clock()
            try:
                await self._stop(new)
                try:
                    yield turn
                except CheckpointError:
                    await self._rest()
                    raise
                await self._rest()
            except TrainerFailed:  # any other error ends the run
                self._trainer.kill()  # else it would keep its memory on the devices
                self._has_rested = False
                await self._go_on(new)
                raise
            except CheckpointError:
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
        self._standing, self._away = [*self._roster.clients, *newcomers], ALL_MEMORY
        await self._each("pause", lambda engine: engine.pause(self._pause))
        await self._each("release", lambda engine: engine.release_memory(ALL_MEMORY))
        if self._has_rested:
            await self._trainer.wake()

    async def _rest(self) -> None:
        if not self._has_rested:
            # What it keeps of its first step must be there when engines size their pools.
            await self._trainer.show_peak()
        await self._trainer.rest()
        self._has_rested = True

    async def _go_on(self, newcomers: Sequence[EngineClient]) -> None:
        # An engine that was lost meanwhile may hold a mixture of two versions: it stays stopped. So does one
        # that was withdrawn, but it regains its memory, for its next update.
        whole = {*self._roster.clients, *newcomers}
        kept = whole.union(self._roster.withdrawn)
        self._standing = [engine for engine in self._standing if engine in kept]
        await self._each("regain", lambda engine: engine.regain_memory(self._away))
        self._standing = [engine for engine in self._standing if engine in whole]
        await self._each("resume", lambda engine: engine.resume())
        self._trainer_rests = True
        self._changes.notify()

    async def _each(self, step: str, call: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Take one step of the protocol on every standing engine. Condemn the engines that fail it."""

        async def attempt(engine: EngineClient) -> str | None:
            try:
                await asyncio.wait_for(call(engine), self._timeout_s)
            except TimeoutError:
                return f"{step}: no answer in {self._timeout_s:g} s"
            except Exception as error:  # whatever a client raises, the engine is out and the others go on
                return f"{step}: {error_text(error)}"
            return None

        failures = await asyncio.gather(*map(attempt, self._standing))
        for engine, reason in zip(self._standing, failures, strict=True):
            if reason is not None:
                self._roster.condemn(engine, reason)
        self._standing = [
            engine for engine, reason in zip(self._standing, failures, strict=True) if reason is None
        ]
