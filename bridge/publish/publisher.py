"""Publish one policy version to the engines.

    ask -> prepare -> pause -> update -> resume

Generation stops only between pause and resume; requests that arrive meanwhile wait. An engine that has stood
still for some time fails when it is asked, while the others still generate. The transport implements
``prepare`` and ``update``. An engine counts as updated only if it completes every step. An engine that fails
a step is named in the report and never resumed, because it may hold a mixture of two versions; its owner must
fence it off and rebuild it.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.publish.bucket_stream import BucketStream
from slipstream.bridge.publish.endpoint import PAUSE, EngineEndpoint, Interrupt
from slipstream.bridge.publish.publication import NoRoom, Publication, Timeouts
from slipstream.bridge.publish.report import PublishReport


class Transport(Protocol):
    """A way for the weights to reach the engines. Lives on the sender for the whole run. Single caller.

    An engine that fails a step is dropped from ``publication``. ``prepare`` gets all buckets; the publisher
    exhausts the buckets that ``update`` leaves.
    """

    async def prepare(self, publication: Publication, buckets: BucketStream) -> None:
        """Do everything that can be done while the engines generate. Raises NoRoom."""
        ...

    async def update(self, publication: Publication, buckets: BucketStream) -> None:
        """Give the engines their new weights while they are paused."""
        ...


class Publisher:
    """Publishes versions from the sender. Single caller: one publication at a time."""

    def __init__(self, transport: Transport, *, interrupt: Interrupt | None, timeouts: Timeouts) -> None:
        """``interrupt``: None if the caller pauses and resumes the engines."""
        self._transport = transport
        self._interrupt: Interrupt | None = interrupt
        self._timeouts = timeouts
        self._export_thread = ThreadPoolExecutor(1, thread_name_prefix="gather")

    async def publish(
        self, version: int, engines: Sequence[EngineEndpoint], buckets: Iterator[FlatBucket | None]
    ) -> PublishReport:
        """Send ``buckets`` as ``version`` to ``engines``. Always exhausts ``buckets``."""
        publication = Publication(version, engines, self._timeouts)
        stream = BucketStream(buckets, self._export_thread)
        start = time.monotonic()
        try:
            await self._publish(publication, stream)
        except NoRoom as error:
            publication.report.no_room = str(error)
        finally:
            await stream.exhaust()
            publication.report.total_s = time.monotonic() - start
        return publication.report

    async def _publish(self, publication: Publication, buckets: BucketStream) -> None:
        await publication.each("ask", lambda engine: engine.respond())
        with publication.transport_at_work():
            await self._transport.prepare(publication, buckets)
        if self._interrupt is None:
            await self._update(publication, buckets)
        else:
            pause, paused_at = PAUSE[self._interrupt], time.monotonic()
            await publication.each("pause", lambda engine: engine.pause(pause))
            await self._update(publication, buckets)
            await publication.each("resume", lambda engine: engine.resume())
            publication.report.stall_s = time.monotonic() - paused_at
        publication.report.updated = [engine.name for engine in publication.engines]

    async def _update(self, publication: Publication, buckets: BucketStream) -> None:
        with publication.transport_at_work():
            await self._transport.update(publication, buckets)
