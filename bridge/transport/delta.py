"""Send only what changed since the version that an engine has a replica of.

The sender keeps the last version in host memory, and every engine has a replica of it on its own node
(``transport.replica``). Patches travel while the engines generate; in the pause each engine loads its
replica. The patches of an engine that has no replica of the last version start from the weights with which it
has started. A bucket that does not match its checksum is sent whole.
"""

import asyncio
import logging
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from slipstream.bridge.group.pinned import PinnedPool
from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.index import HfCheckpointError
from slipstream.bridge.hf.quantization import EngineFp8
from slipstream.bridge.publish.bucket_stream import BucketStream
from slipstream.bridge.publish.endpoint import EngineEndpoint, error_text
from slipstream.bridge.publish.publication import Publication
from slipstream.bridge.shards.fp8 import sent_by
from slipstream.bridge.shards.plan import ExportPlan
from slipstream.bridge.transport import patches
from slipstream.bridge.transport.patches import ByteArray
from slipstream.bridge.transport.replica import Opening, ReplicaFile, StartingWeights

log = logging.getLogger(__name__)


class DeltaTransport:
    def __init__(self, plan: ExportPlan, model: Path, dtype: str, fp8: EngineFp8 | None = None) -> None:
        """``model``: the checkpoint from which the engines start. ``dtype``: torch's name of the weights'
        dtype. ``fp8``: as in ``engine_buckets``.
        """
        self._files = tuple(ReplicaFile(t.names, t.shapes, t.dtype) for t in sent_by(plan, dtype, fp8))
        self._initial = StartingWeights(model)
        self._base: list[ByteArray] = [np.empty(0, np.uint8) for _ in self._files]
        """The last version, by bucket."""
        self._pool = PinnedPool()
        self._version: int | None = None
        """Version of ``_base``; None while it changes."""

    async def prepare(self, publication: Publication, buckets: BucketStream) -> None:
        base, self._version = self._version, None
        versions = await publication.each("held", lambda engine: engine.replica_version())
        followers = {engine.name for engine, version in versions.items() if version == base is not None}
        openings = [msgspec.msgpack.encode(Opening(self._files, afresh)) for afresh in (True, False)]
        await publication.each(
            "open",
            lambda engine: engine.replica_begin(openings[engine.name in followers]),
            moves_weights=True,
        )
        with publication.report.timed("gather"):
            await buckets.advance()
        for number in range(len(self._base)):
            bucket = buckets.current
            assert bucket is not None
            await asyncio.gather(self._send(publication, number, bucket, followers), buckets.advance())
        await publication.each(
            "commit", lambda engine: engine.replica_commit(publication.version), moves_weights=True
        )
        self._version = publication.version

    async def update(self, publication: Publication, buckets: BucketStream) -> None:
        await publication.each(
            "load",
            lambda engine: engine.load_replica(version=publication.version),
            moves_weights=True,
        )

    async def _send(
        self, publication: Publication, number: int, bucket: FlatBucket, followers: set[str]
    ) -> None:
        """Send one bucket to every engine and copy it into the base.

        ``followers``: names of the engines whose replica equals the base.
        """
        host = await asyncio.to_thread(self._pool.copy, bucket.flat)
        try:
            await self._send_bytes(publication, number, host, followers)
        finally:
            self._pool.give_back(host)

    async def _send_bytes(
        self, publication: Publication, number: int, host: Tensor, followers: set[str]
    ) -> None:
        """Do what ``_send`` does with a bucket on the host."""
        base, new, itemsize = self._base[number], host.view(torch.uint8).numpy(), host.itemsize
        names = {engine.name for engine in publication.engines}
        patch = afresh = b""
        if names & followers:
            patch = await asyncio.to_thread(_patch, base, new, itemsize)
        if names - followers:
            afresh = await asyncio.to_thread(self._patch_afresh, number, new, itemsize)

        whole: asyncio.Task[bytes] | None = None

        async def send_to(engine: EngineEndpoint) -> int:
            """Return the number of bytes that were sent."""
            nonlocal whole
            small = patch if engine.name in followers else afresh
            try:
                await engine.replica_patch(number, small)
                return len(small)
            except OSError:
                raise
            except Exception as error:  # a refusal, of a type that only the client knows
                log.warning("sending bucket %d whole to %s: %s", number, engine.name, error_text(error))
            whole = whole or asyncio.create_task(asyncio.to_thread(_whole, new, itemsize))
            whole_bucket = await asyncio.shield(whole)  # others may wait for it too
            await engine.replica_patch(number, whole_bucket)
            return len(small) + len(whole_bucket)

        sent = await publication.each("send", send_to, moves_weights=True)
        publication.report.bytes_sent += max(sent.values(), default=0)
        if len(base) == len(new):
            await asyncio.to_thread(np.copyto, base, new)
        else:
            self._base[number] = new.copy()

    def _patch_afresh(self, number: int, new: ByteArray, itemsize: int) -> bytes:
        """Return the patch from the initial weights; the bucket itself if they cannot be read."""
        initial = np.empty_like(new)
        try:
            self._initial.copy_into(initial, self._files[number])
        except (HfCheckpointError, OSError) as error:
            log.warning("sending bucket %d whole: %s", number, error_text(error))
            return _whole(new, itemsize)
        return _patch(initial, new, itemsize)


def _patch(base: ByteArray, new: ByteArray, itemsize: int) -> bytes:
    return patches.encoded(patches.difference(base, new, itemsize))


def _whole(new: ByteArray, itemsize: int) -> bytes:
    return patches.encoded(patches.whole(new, itemsize))
