"""One policy version on its way to the engines: which engines still take part, and the report."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from slipstream.bridge.publish.endpoint import EngineEndpoint, error_text
from slipstream.bridge.publish.report import PublishReport

log = logging.getLogger(__name__)

T = TypeVar("T")


class NoRoom(Exception):
    """There is no room for a version that is being prepared. Nothing of it has reached an engine."""


@dataclass(frozen=True)
class Timeouts:
    """Limits on one step of a publication, in seconds."""

    transfer_s: float
    """Limit on a step that moves weights or opens connections."""
    answer_s: float
    """Limit on a step that an engine only acknowledges. The other engines are paused meanwhile."""


class Publication:
    """Runs steps on all engines at once. Single caller.

    An engine that fails a step takes no part in later ones, and the other engines go on.
    """

    def __init__(self, version: int, engines: Iterable[EngineEndpoint], timeouts: Timeouts) -> None:
        self.version = version
        self.engines = list(engines)
        """Engines that still take part."""
        self.timeouts = timeouts
        self.report = PublishReport(version)

    async def each(
        self,
        step: str,
        call: Callable[[EngineEndpoint], Awaitable[T]],
        *,
        moves_weights: bool = False,
    ) -> dict[EngineEndpoint, T]:
        """Run one step on every engine at once. Returns the results of the engines that completed it."""
        timeout_s = self.timeouts.transfer_s if moves_weights else self.timeouts.answer_s
        results: dict[EngineEndpoint, T] = {}
        since = time.strftime("%T")

        async def attempt(engine: EngineEndpoint) -> None:
            try:
                results[engine] = await asyncio.wait_for(call(engine), timeout_s)
            except TimeoutError:
                self.fail(engine, step, f"no answer in {timeout_s:g} s, since {since}")
            except Exception as error:  # whatever a client raises, its engine drops out and the others go on
                self.fail(engine, step, error_text(error))

        with self.report.timed(step):
            await asyncio.gather(*map(attempt, self.engines))
        return results

    @contextmanager
    def transport_at_work(self) -> Generator[None]:
        """Count the engines that fail inside the block as cut off by the transport."""
        before = set(self.report.failed)
        try:
            yield
        finally:
            self.report.cut_off += [name for name in self.report.failed if name not in before]

    def fail(self, engine: EngineEndpoint, step: str, reason: str) -> None:
        """Drop an engine that may hold a mixture of two versions. It must be rebuilt."""
        self.report.failed[engine.name] = f"{step} for version {self.version}: {reason}"
        log.warning("engine %s dropped out: %s", engine.name, self.report.failed[engine.name])
        self.engines = [other for other in self.engines if other is not engine]
