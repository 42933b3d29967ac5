"""One policy version on its way into the engines: who is still in it, and what the report says."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from slipstream.bridge.endpoint import EngineEndpoint, told
from slipstream.bridge.export import FlatBucket
from slipstream.bridge.report import PublishReport

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """How long one step may take, in seconds."""

    step: float
    """One that moves weights, or makes connections."""
    answer: float
    """One that an engine only has to say yes to: the others stand still meanwhile."""


class Publication:
    """Single caller. An engine that fails a step is in none of the later ones, and the others go on."""

    def __init__(self, version: int, engines: Iterable[EngineEndpoint], patience: Patience) -> None:
        self.version = version
        self.engines = list(engines)
        self.patience = patience
        self.report = PublishReport(version)

    async def each(
        self,
        step: str,
        call: Callable[[EngineEndpoint], Awaitable[T]],
        *,
        moves_weights: bool = False,
    ) -> dict[EngineEndpoint, T]:
        """Do one step on every engine at once: the answers of those that are still in."""
        timeout_s = self.patience.step if moves_weights else self.patience.answer

        async def attempt(engine: EngineEndpoint) -> T | None:
            try:
                return await asyncio.wait_for(call(engine), timeout_s)
            except TimeoutError:
                self.fail(engine, step, f"no answer in {timeout_s:g} s")
            except Exception as error:  # whatever a client raises, the engine is out and the others go on
                self.fail(engine, step, told(error))
            return None

        with self.report.timed(step):
            asked = list(self.engines)
            answers = await asyncio.gather(*map(attempt, asked))
        return {engine: answer for engine, answer in zip(asked, answers, strict=True) if self.has(engine)}

    def has(self, engine: EngineEndpoint) -> bool:
        return engine.name not in self.report.failed and engine.name not in self.report.interrupted

    def fail(self, engine: EngineEndpoint, step: str, reason: str) -> None:
        """The engine is out; it may hold a mixture of two versions, and must be rebuilt."""
        self._out(engine, self.report.failed, step, reason)

    def interrupt(self, engine: EngineEndpoint, step: str, reason: str) -> None:
        """The engine is out through no fault of its own; it stands still until it is given all weights."""
        self._out(engine, self.report.interrupted, step, reason)

    def _out(self, engine: EngineEndpoint, where: dict[str, str], step: str, reason: str) -> None:
        where[engine.name] = f"{step} for version {self.version}: {reason}"
        log.warning("engine %s dropped out: %s", engine.name, where[engine.name])
        self.engines = [other for other in self.engines if other is not engine]


class Buckets:
    """The exported buckets, one at a time, each made while something else goes on.

    The other ranks walk the same plan: whoever stops before the end leaves them in their sends. ``consumed``
    goes to the end on every path.
    """

    def __init__(self, buckets: Iterator[FlatBucket | None], thread: ThreadPoolExecutor) -> None:
        self._buckets = buckets
        self._thread = thread
        self.current: FlatBucket | None = None
        """The one in hand; None before the first and after the last."""

    async def advance(self) -> None:
        """Take the next one in hand. What the last but one was made in is used again."""
        self.current = await self._in_thread(lambda: next(self._buckets, None))

    async def into(self, work: Callable[[Iterator[FlatBucket | None]], T]) -> T:
        """Let ``work``, which may block, have the buckets that are left."""
        return await self._in_thread(lambda: work(self._buckets))

    async def consumed(self) -> None:
        # In the same thread, because a bucket may still be in the making there.
        await self.into(lambda buckets: deque(buckets, 0))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
