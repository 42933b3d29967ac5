"""One policy version into the engines.

    join -> pause -> begin -> buckets (the next is gathered while the last is sent) -> end -> resume

Generation stops only between pause and resume. An engine counts as updated only when it has answered every
step; one that has not is named in the report and must be fenced off and rebuilt by its owner. It is never
resumed, because it may hold a mixture of two versions.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol

from bridge.export import FlatBucket
from bridge.report import PublishReport
from bridge.transport.distributed import BroadcastGroup, free_port

log = logging.getLogger(__name__)

Interrupt = Literal["retract", "in_place"]


class EngineEndpoint(Protocol):
    """The control side of one engine. Every call raises on refusal."""

    name: str
    ranks: int

    async def join_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str
    ) -> None: ...
    async def leave_group(self, group: str) -> None: ...
    async def pause(self, mode: Interrupt) -> None: ...
    async def begin_update(self) -> None: ...
    async def receive(
        self,
        *,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtype: str,
        group: str,
        flush_cache: bool,
        version: int | None,
    ) -> None: ...
    async def end_update(self) -> None: ...
    async def resume(self) -> None: ...


class Publisher:
    """Publishes versions from the sender. Holds the group that joins it to the engines.

    Single caller: one publication at a time.
    """

    def __init__(self, *, address: str, backend: str, interrupt: Interrupt, timeout_s: float) -> None:
        self._address = address
        self._backend = backend
        self._interrupt: Interrupt = interrupt
        self._timeout_s = timeout_s
        self._group: BroadcastGroup | None = None
        self._group_name = ""
        self._members: tuple[str, ...] = ()
        self._groups_made = 0
        self._gatherer = ThreadPoolExecutor(1, thread_name_prefix="gather")
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="broadcast")
        """The present group's own thread: one that a dead peer blocks is left behind with its group."""

    async def publish(
        self, version: int, engines: Sequence[EngineEndpoint], buckets: Iterator[FlatBucket | None]
    ) -> PublishReport:
        """Send ``buckets`` as ``version`` to ``engines``; always consumes ``buckets`` to its end."""
        report = PublishReport(version)
        start = time.monotonic()
        try:
            await self._publish(list(engines), buckets, report)
        finally:
            for _ in buckets:
                """The other ranks walk the same plan: leaving early would leave them in a collective."""
            report.total_s = time.monotonic() - start
        return report

    async def _publish(
        self, engines: list[EngineEndpoint], buckets: Iterator[FlatBucket | None], report: PublishReport
    ) -> None:
        bucket = await self._next(buckets)
        engines = await self._join(engines, report)
        paused_at = time.monotonic()
        engines = await self._all("pause", engines, lambda e: e.pause(self._interrupt), report)
        engines = await self._all("begin", engines, lambda e: e.begin_update(), report)
        engines = await self._join(engines, report)
        while bucket is not None and engines:
            engines, bucket = await asyncio.gather(self._send(engines, bucket, report), self._next(buckets))
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
                reason = f"{type(error).__name__}: {error}"
            self._fail(engine, f"{what} for version {report.version}: {reason}", report)
            return None

        return [engine for engine in await asyncio.gather(*map(attempt, engines)) if engine is not None]

    def _fail(self, engine: EngineEndpoint, reason: str, report: PublishReport) -> None:
        log.warning("engine %s dropped out: %s", engine.name, reason)
        report.failed[engine.name] = reason

    async def _join(self, engines: list[EngineEndpoint], report: PublishReport) -> list[EngineEndpoint]:
        """Make the process group's members exactly ``engines``."""
        members = tuple(engine.name for engine in engines)
        if not engines or (members == self._members and self._group is not None):
            return engines
        await self._leave(engines)
        port = free_port(self._address)
        self._groups_made += 1
        name = f"slipstream-weights-{self._groups_made}"
        *offset_of, world_size = itertools.accumulate((engine.ranks for engine in engines), initial=1)
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=name)
        loop = asyncio.get_running_loop()
        opened = loop.run_in_executor(
            self._sender, BroadcastGroup, self._backend, self._address, port, world_size, name, self._timeout_s
        )
        joined = await self._all(
            "join",
            engines,
            lambda e: e.join_group(
                address=self._address,
                port=port,
                rank_offset=offset_of[engines.index(e)],
                world_size=world_size,
                group=name,
                backend=self._backend,
            ),
            report,
        )
        try:
            group = await opened
        except Exception as error:  # a rendezvous that lacks a member raises; the store's type is not public
            for engine in joined:
                self._fail(engine, f"join for version {report.version}: {error}", report)
            return []
        if len(joined) < len(engines):
            await loop.run_in_executor(self._sender, group.close)
            return await self._join(joined, report)
        self._group, self._group_name, self._members = group, name, members
        return joined

    async def _leave(self, engines: list[EngineEndpoint]) -> None:
        """Close the present group. Members that are gone, or refuse, cannot hold it open."""
        if self._group is None:
            return
        members, group = self._members, self._group_name
        self._drop_group()
        await asyncio.gather(
            *(
                asyncio.wait_for(engine.leave_group(group), self._timeout_s)
                for engine in engines
                if engine.name in members
            ),
            return_exceptions=True,
        )

    def _drop_group(self) -> None:
        if self._group is not None:
            self._sender.submit(self._group.close)
            self._sender.shutdown(wait=False)
        self._group, self._group_name, self._members = None, "", ()

    async def _send(
        self, engines: list[EngineEndpoint], bucket: FlatBucket, report: PublishReport
    ) -> list[EngineEndpoint]:
        """Broadcast one bucket. A failure breaks the group and with it the update of every member."""
        assert self._group is not None
        loop = asyncio.get_running_loop()
        waits = [
            asyncio.ensure_future(
                engine.receive(
                    names=bucket.names,
                    shapes=bucket.shapes,
                    dtype=str(bucket.flat.dtype).removeprefix("torch."),
                    group=self._group_name,
                    flush_cache=bucket.last and self._interrupt == "retract",
                    version=report.version if bucket.last else None,
                )
            )
            for engine in engines
        ]
        waits.append(asyncio.ensure_future(loop.run_in_executor(self._sender, self._group.send, bucket.flat)))
        done, pending = await asyncio.wait(waits, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error for wait in done if (error := wait.exception()) is not None]
        if not errors and not pending:
            report.bytes_sent += bucket.flat.nbytes
            return engines
        for wait in pending:
            wait.cancel()
        reason = str(errors[0]) if errors else f"a weight bucket was not taken in {self._timeout_s:.0f} s"
        for engine in engines:
            self._fail(engine, f"receive of version {report.version}: {reason}", report)
        self._drop_group()
        return []
