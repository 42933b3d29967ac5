"""Broadcast from the sender to every rank of every engine, over NCCL or gloo.

The next bucket is gathered while the last one is sent.
"""

import asyncio

from slipstream.bridge.endpoint import EngineEndpoint, told
from slipstream.bridge.export import FlatBucket
from slipstream.bridge.publication import Buckets, Patience, Publication
from slipstream.bridge.transport.engine_group import EngineGroup


class DistributedTransport:
    """Keeps the group that joins the sender to the engines from one version to the next."""

    def __init__(self, *, address: str, backend: str, patience: Patience, label: str) -> None:
        """``label`` begins the names of this sender's groups. An engine keeps the groups of a sender that is
        gone, so no two senders may share one.
        """
        self._group = EngineGroup(address=address, backend=backend, timeout_s=patience.step, label=label)
        self._used = ""
        """The last group that carried a bucket."""

    async def prepare(self, publication: Publication, buckets: Buckets) -> None:
        with publication.report.timed("gather"):
            await buckets.advance()
        with publication.report.timed("join"):
            await self._join(publication)

    async def update(self, publication: Publication, buckets: Buckets, *, flush_cache: bool) -> None:
        await publication.each("begin", lambda engine: engine.begin_update())
        with publication.report.timed("send"):
            await self._join(publication)  # again without those that have just dropped out
            while (bucket := buckets.current) is not None and publication.engines:
                await asyncio.gather(self._send(publication, bucket, flush_cache), buckets.advance())
        await publication.each("end", lambda engine: engine.end_update())

    async def _join(self, publication: Publication) -> None:
        """Make the group's members exactly those of the publication, less those that cannot be joined."""

        def fail(engine: EngineEndpoint, reason: str) -> None:
            publication.fail(engine, "join", reason)

        await self._group.join(publication.engines, fail)

    async def _send(self, publication: Publication, bucket: FlatBucket, flush_cache: bool) -> None:
        """Broadcast one bucket. A failure breaks the group and with it the update of every member."""
        engines = list(publication.engines)
        takes = [
            asyncio.ensure_future(
                engine.receive(
                    names=bucket.names,
                    shapes=bucket.shapes,
                    dtype=str(bucket.flat.dtype).removeprefix("torch."),
                    group=self._group.name,
                    flush_cache=flush_cache and bucket.last,
                    version=publication.version if bucket.last else None,
                )
            )
            for engine in engines
        ]
        send = asyncio.ensure_future(self._group.send(bucket.flat))
        # NCCL makes its connections with the first bucket.
        patience = publication.patience
        timeout_s = patience.answer if self._used == self._group.name else patience.step
        done, late = await asyncio.wait(
            [*takes, send], timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        if not late and not any(wait.exception() for wait in done):
            self._used = self._group.name
            publication.report.bytes_sent += bucket.flat.nbytes
            return
        reason = next(
            (told(error) for wait in done if (error := wait.exception())),
            f"a weight bucket was not taken in {timeout_s:g} s",
        )
        await self._call_off(publication, dict(zip(engines, takes, strict=True)), reason)
        send.cancel()

    async def _call_off(
        self, publication: Publication, takes: dict[EngineEndpoint, asyncio.Future[None]], reason: str
    ) -> None:
        """Find out whose fault it was that a bucket did not arrive everywhere.

        That of engines that are gone or do not answer; else of those that refused it. The others fail only
        when the sender leaves the group, and may be given all weights again.
        """
        refused = [engine for engine, take in takes.items() if take.done() and take.exception()]
        self._group.drop()
        _, late = await asyncio.wait(takes.values(), timeout=publication.patience.answer)
        lost = [
            engine for engine, take in takes.items() if take in late or isinstance(take.exception(), OSError)
        ]
        for engine in lost or refused:
            take = takes[engine]
            why = f"no answer; {reason}" if take.cancel() else told(take.exception())
            publication.fail(engine, "send", why)
        await publication.each("end", lambda engine: engine.end_update())
        for engine in list(publication.engines):
            publication.interrupt(engine, "send", reason)
