"""One policy version into the engines.

    join -> pause -> begin -> buckets (the next is gathered while the last is sent) -> end -> resume

Generation stops only between pause and resume; requests that come meanwhile wait. An engine counts as updated
only when it has answered every step; one that has not is named in the report and must be fenced off and
rebuilt by its owner. It is never resumed, because it may hold a mixture of two versions.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from bridge.engine_group import EngineEndpoint, EngineGroup, Pause, told
from bridge.export import FlatBucket
from bridge.report import PublishReport

__all__ = ["EngineEndpoint", "Interrupt", "PublishReport", "Publisher"]

log = logging.getLogger(__name__)

Interrupt = Literal["retract", "in_place", "abort", "drain"]

PAUSE: dict[Interrupt, Pause] = {
    "retract": "retract",
    "in_place": "in_place",
    "abort": "abort",
    "drain": "retract",
}
"""Draining is done before, by whoever sends the requests: without a pause SGLang lets new ones run between
any two steps of an update, on weights of two versions. The pause then finds an idle engine, but for requests
that outlasted the draining."""


class Publisher:
    """Publishes versions from the sender. Keeps the group that joins it to the engines from one to the next.

    Single caller: one publication at a time.
    """

    def __init__(
        self, *, address: str, backend: str, interrupt: Interrupt, timeout_s: float, label: str
    ) -> None:
        """``label`` begins the names of this publisher's groups. An engine keeps the groups of a sender that
        is gone, so no two senders may share one.
        """
        self._interrupt: Interrupt = interrupt
        self._timeout_s = timeout_s
        self._group = EngineGroup(address=address, backend=backend, timeout_s=timeout_s, label=label)
        self._gatherer = ThreadPoolExecutor(1, thread_name_prefix="gather")

    async def publish(
        self, version: int, engines: Sequence[EngineEndpoint], buckets: Iterator[FlatBucket | None]
    ) -> PublishReport:
        """Send ``buckets`` as ``version`` to ``engines``; always consumes ``buckets`` to its end."""
        report = PublishReport(version)
        start = time.monotonic()
        try:
            await self._publish(list(engines), buckets, report)
        finally:
            # The other ranks walk the same plan: leaving early would leave them in a collective. In the
            # gatherer's thread, because a bucket may still be in the making there.
            await asyncio.get_running_loop().run_in_executor(self._gatherer, deque, buckets, 0)
            report.total_s = time.monotonic() - start
        return report

    async def _publish(
        self, engines: list[EngineEndpoint], buckets: Iterator[FlatBucket | None], report: PublishReport
    ) -> None:
        with report.timed("gather"):
            bucket = await self._next(buckets)
        with report.timed("join"):
            engines = await self._join(engines, report)
        paused_at = time.monotonic()
        engines = await self._all("pause", engines, lambda e: e.pause(PAUSE[self._interrupt]), report)
        engines = await self._all("begin", engines, lambda e: e.begin_update(), report)
        with report.timed("send"):
            engines = await self._join(engines, report)  # again without those that have just dropped out
            while bucket is not None and engines:
                sending = self._send(engines, bucket, report)
                engines, bucket = await asyncio.gather(sending, self._next(buckets))
        engines = await self._all("end", engines, lambda e: e.end_update(), report)
        engines = await self._all("resume", engines, lambda e: e.resume(), report)
        report.stall_s = time.monotonic() - paused_at
        report.updated = [engine.name for engine in engines]

    async def _next(self, buckets: Iterator[FlatBucket | None]) -> FlatBucket | None:
        return await asyncio.get_running_loop().run_in_executor(self._gatherer, next, buckets, None)

    async def _all(
        self,
        what: str,
        engines: list[EngineEndpoint],
        call: Callable[[EngineEndpoint], Awaitable[None]],
        report: PublishReport,
    ) -> list[EngineEndpoint]:
        """Do one step on every engine at once; those that refuse or do not answer are out of this version."""

        async def attempt(engine: EngineEndpoint) -> EngineEndpoint | None:
            try:
                await asyncio.wait_for(call(engine), self._timeout_s)
                return engine
            except TimeoutError:
                reason = f"no answer in {self._timeout_s:.0f} s"
            except Exception as error:  # whatever a client raises, the engine is out and the others go on
                reason = told(error)
            self._fail(engine, f"{what} for version {report.version}: {reason}", report)
            return None

        with report.timed(what):
            done = await asyncio.gather(*map(attempt, engines))
        return [engine for engine in done if engine is not None]

    def _fail(self, engine: EngineEndpoint, reason: str, report: PublishReport) -> None:
        log.warning("engine %s dropped out: %s", engine.name, reason)
        report.failed[engine.name] = reason

    async def _join(self, engines: list[EngineEndpoint], report: PublishReport) -> list[EngineEndpoint]:
        """Make the process group's members exactly ``engines``, less those that cannot be joined."""

        def fail(engine: EngineEndpoint, reason: str) -> None:
            self._fail(engine, f"join for version {report.version}: {reason}", report)

        return await self._group.join(engines, fail)

    async def _send(
        self, engines: list[EngineEndpoint], bucket: FlatBucket, report: PublishReport
    ) -> list[EngineEndpoint]:
        """Broadcast one bucket. A failure breaks the group and with it the update of every member."""
        waits = [
            asyncio.ensure_future(
                engine.receive(
                    names=bucket.names,
                    shapes=bucket.shapes,
                    dtype=str(bucket.flat.dtype).removeprefix("torch."),
                    group=self._group.name,
                    # KV that is kept cannot be flushed: SGLang refuses while requests hold some.
                    flush_cache=bucket.last and self._interrupt != "in_place",
                    version=report.version if bucket.last else None,
                )
            )
            for engine in engines
        ]
        waits.append(asyncio.ensure_future(self._group.send(bucket.flat)))
        done, pending = await asyncio.wait(
            waits, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        errors = [error for wait in done if (error := wait.exception()) is not None]
        if not errors and not pending:
            report.bytes_sent += bucket.flat.nbytes
            return engines
        for wait in pending:
            wait.cancel()
        reason = told(errors[0]) if errors else f"a weight bucket was not taken in {self._timeout_s:.0f} s"
        for engine in engines:
            self._fail(engine, f"receive of version {report.version}: {reason}", report)
        self._group.drop()
        return []
