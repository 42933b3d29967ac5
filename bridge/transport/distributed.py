"""Broadcast from the sender to every rank of every engine, over NCCL or gloo.

The next bucket is gathered while the current one is sent.
"""

import asyncio

from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.publish.bucket_stream import BucketStream
from slipstream.bridge.publish.endpoint import EngineEndpoint, error_text
from slipstream.bridge.publish.publication import Publication, Timeouts
from slipstream.bridge.transport.engine_group import EngineGroup


class DistributedTransport:
    """Keeps the group of the sender and the engines from one version to the next."""

    def __init__(self, *, address: str, backend: str, timeouts: Timeouts, label: str) -> None:
        """``label``: prefix of the names of this sender's groups. It must be unique among senders, because an
        engine keeps the groups of a sender that is gone.
        """
        self._group = EngineGroup(
            address=address, backend=backend, timeout_s=timeouts.transfer_s, label=label
        )
        self._used = ""
        """Name of the last group that transferred a bucket."""

    async def prepare(self, publication: Publication, buckets: BucketStream) -> None:
        with publication.report.timed("gather"):
            await buckets.advance()
        with publication.report.timed("join"):
            await self._join(publication)

    async def update(self, publication: Publication, buckets: BucketStream, *, flush_cache: bool) -> None:
        await publication.each("begin", lambda engine: engine.begin_update())
        with publication.report.timed("send"):
            await self._join(publication)  # again, because engines may have dropped out since ``prepare``
            while (bucket := buckets.current) is not None and publication.engines:
                await asyncio.gather(self._send(publication, bucket, flush_cache), buckets.advance())
        await publication.each("end", lambda engine: engine.end_update())

    async def _join(self, publication: Publication) -> None:
        """Make the publication's engines the members of the group. Engines that cannot join drop out."""

        def fail(engine: EngineEndpoint, reason: str) -> None:
            publication.fail(engine, "join", reason)

        await self._group.join(publication.engines, fail)

    async def _send(self, publication: Publication, bucket: FlatBucket, flush_cache: bool) -> None:
        """Broadcast one bucket. A failure breaks the group, and with it the update of every member."""
        engines = list(publication.engines)
        receipts = [
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
        timeouts = publication.timeouts
        # NCCL opens its connections with the first bucket.
        timeout_s = timeouts.answer_s if self._used == self._group.name else timeouts.transfer_s
        done, late = await asyncio.wait(
            [*receipts, send], timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        errors = [error for task in done if (error := task.exception())]
        if not late and not errors:
            self._used = self._group.name
            publication.report.bytes_sent += bucket.flat.nbytes
            return
        reason = error_text(errors[0]) if errors else f"a weight bucket was not received in {timeout_s:g} s"
        await self._call_off(publication, dict(zip(engines, receipts, strict=True)), reason)
        send.cancel()

    async def _call_off(
        self, publication: Publication, receipts: dict[EngineEndpoint, asyncio.Task[None]], reason: str
    ) -> None:
        """Drop the group after a bucket did not arrive everywhere, and decide which engines are to blame.

        Engines that are gone or do not answer are to blame; if there are none, those that refused the bucket.
        The other engines fail only because the sender leaves the group, and may get all weights again.
        """
        refused = [engine for engine, receipt in receipts.items() if _error(receipt)]
        self._group.drop()
        await asyncio.wait(receipts.values(), timeout=publication.timeouts.answer_s)
        lost = [
            engine
            for engine, receipt in receipts.items()
            if not receipt.done() or isinstance(_error(receipt), OSError)
        ]
        for engine in lost or refused:
            error = _error(receipts[engine])
            receipts[engine].cancel()
            publication.fail(engine, "send", error_text(error) if error else f"no answer; {reason}")
        await publication.each("end", lambda engine: engine.end_update())
        for engine in list(publication.engines):
            publication.interrupt(engine, "send", reason)


def _error(task: asyncio.Task[None]) -> BaseException | None:
    """Return the error of a task that has ended with one."""
    return task.exception() if task.done() else None
