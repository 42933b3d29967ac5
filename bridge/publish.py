"""One policy version into the engines.

    prepare -> pause -> update -> resume

Generation stops only between pause and resume; requests that come meanwhile wait. What ``prepare`` and
``update`` are is the transport's. An engine counts as updated only when it has answered every step; one that
has not is named in the report and must be fenced off and rebuilt by its owner. It is never resumed, because
it may hold a mixture of two versions.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from slipstream.bridge.endpoint import PAUSE, EngineEndpoint, Interrupt
from slipstream.bridge.export import FlatBucket
from slipstream.bridge.publication import Buckets, Patience, Publication
from slipstream.bridge.report import PublishReport
from slipstream.bridge.transport import Transport

__all__ = ["EngineEndpoint", "Interrupt", "PublishReport", "Publisher"]


class Publisher:
    """Publishes versions from the sender. Single caller: one publication at a time."""

    def __init__(self, transport: Transport, *, interrupt: Interrupt | None, patience: Patience) -> None:
        """``interrupt``: None for engines that stand still already, and go on when the caller lets them."""
        self._transport = transport
        self._interrupt: Interrupt | None = interrupt
        self._patience = patience
        self._gatherer = ThreadPoolExecutor(1, thread_name_prefix="gather")

    async def publish(
        self, version: int, engines: Sequence[EngineEndpoint], buckets: Iterator[FlatBucket | None]
    ) -> PublishReport:
        """Send ``buckets`` as ``version`` to ``engines``; always consumes ``buckets`` to its end."""
        publication = Publication(version, engines, self._patience)
        coming = Buckets(buckets, self._gatherer)
        start = time.monotonic()
        try:
            await self._publish(publication, coming)
        finally:
            await coming.consumed()
            publication.report.total_s = time.monotonic() - start
        return publication.report

    async def _publish(self, publication: Publication, buckets: Buckets) -> None:
        # KV that is kept cannot be flushed: SGLang refuses while requests hold some.
        flush_cache = self._interrupt != "in_place"
        await self._transport.prepare(publication, buckets)
        if self._interrupt is None:
            await self._transport.update(publication, buckets, flush_cache=flush_cache)
        else:
            pause, paused_at = PAUSE[self._interrupt], time.monotonic()
            await publication.each("pause", lambda engine: engine.pause(pause))
            await self._transport.update(publication, buckets, flush_cache=flush_cache)
            await publication.each("resume", lambda engine: engine.resume())
            publication.report.stall_s = time.monotonic() - paused_at
        publication.report.updated = [engine.name for engine in publication.engines]
