"""Send only what changed since the version that an engine has a replica of.

The sender keeps the last version in host memory, and every engine has a replica of it on its own node
(``transport.replica``). Patches travel while the engines generate; in the pause each engine loads its
replica. An engine whose replica has another version, or does not match its checksum, gets whole buckets.
"""

import asyncio
import logging

import msgspec
import numpy as np
import torch

from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.publish.bucket_stream import BucketStream
from slipstream.bridge.publish.endpoint import EngineEndpoint, error_text
from slipstream.bridge.publish.publication import Publication
from slipstream.bridge.shards.plan import ExportPlan
from slipstream.bridge.transport import patches
from slipstream.bridge.transport.patches import ByteArray
from slipstream.bridge.transport.replica import ReplicaFile

log = logging.getLogger(__name__)


class DeltaTransport:
    def __init__(self, plan: ExportPlan, dtype: str) -> None:
        """``dtype``: torch's name of the weights' dtype."""
        files = [
            ReplicaFile(b.hf_names, b.hf_shapes, "float32" if b.float32 else dtype) for b in plan.buckets
        ]
        self._files = msgspec.msgpack.encode(files)
        self._base: list[ByteArray] = [np.empty(0, np.uint8) for _ in files]
        """The last version, by bucket."""
        self._version: int | None = None
        """Version of ``_base``; None while it changes."""

    async def prepare(self, publication: Publication, buckets: BucketStream) -> None:
        base, self._version = self._version, None
        versions = await publication.each("held", lambda engine: engine.replica_version())
        followers = {engine.name for engine, version in versions.items() if version == base is not None}
        await publication.each("open", lambda engine: engine.replica_begin(self._files), moves_weights=True)
        with publication.report.timed("gather"):
            await buckets.advance()
        for number in range(len(self._base)):
            bucket = buckets.current
            assert bucket is not None
            await asyncio.gather(self._send(publication, number, bucket, followers), buckets.advance())
        await publication.each("commit", lambda engine: engine.replica_commit(publication.version))
        self._version = publication.version

    async def update(self, publication: Publication, buckets: BucketStream, *, flush_cache: bool) -> None:
        await publication.each(
            "load",
            lambda engine: engine.load_replica(flush_cache=flush_cache, version=publication.version),
            moves_weights=True,
        )

    async def _send(
        self, publication: Publication, number: int, bucket: FlatBucket, followers: set[str]
    ) -> None:
        """Send one bucket to every engine and copy it into the base.

        ``followers``: names of the engines whose replica equals the base.
        """
        base, new = self._base[number], await asyncio.to_thread(_bytes_of, bucket)
        itemsize = bucket.flat.itemsize
        patch: bytes | None = None
        if any(engine.name in followers for engine in publication.engines):
            patch = await asyncio.to_thread(_patch, base, new, itemsize)
        whole: bytes | None = None
        if any(engine.name not in followers for engine in publication.engines):
            whole = await asyncio.to_thread(_whole, new, itemsize)

        async def send_to(engine: EngineEndpoint) -> int:
            """Return the number of bytes that were sent."""
            sent = 0
            if patch is not None and engine.name in followers:
                sent = len(patch)
                try:
                    await engine.replica_patch(number, patch)
                    return sent
                except OSError:
                    raise
                except Exception as error:  # a refusal, of a type that only the client knows
                    log.warning("sending bucket %d whole to %s: %s", number, engine.name, error_text(error))
            whole_bucket = whole or await asyncio.to_thread(_whole, new, itemsize)
            await engine.replica_patch(number, whole_bucket)
            return sent + len(whole_bucket)

        sent = await publication.each("send", send_to, moves_weights=True)
        publication.report.bytes_sent += max(sent.values(), default=0)
        if len(base) == len(new):
            await asyncio.to_thread(np.copyto, base, new)
        else:
            self._base[number] = new.copy()


def _bytes_of(bucket: FlatBucket) -> ByteArray:
    return bucket.flat.view(torch.uint8).cpu().numpy()


def _patch(base: ByteArray, new: ByteArray, itemsize: int) -> bytes:
    return patches.encoded(patches.difference(base, new, itemsize))


def _whole(new: ByteArray, itemsize: int) -> bytes:
    return patches.encoded(patches.whole(new, itemsize))
