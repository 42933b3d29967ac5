"""Only what has changed since the version that an engine has a copy of.

The sender keeps the last version in host memory, and every engine has a copy of it on its own node
(``bridge.replica``). Patches are sent while the engines generate; in the pause each loads its copy. An engine
whose copy is of another version, or comes out wrong, is sent whole buckets.
"""

import asyncio
import logging

import msgspec
import numpy as np
import torch

from slipstream.bridge import delta
from slipstream.bridge.endpoint import EngineEndpoint, told
from slipstream.bridge.export import FlatBucket
from slipstream.bridge.plan import ExportPlan
from slipstream.bridge.publication import Buckets, Publication
from slipstream.bridge.replica import File

log = logging.getLogger(__name__)


class DeltaTransport:
    def __init__(self, plan: ExportPlan, dtype: str) -> None:
        """``dtype``: of the weights, as torch spells it."""
        files = [File(b.hf_names, b.hf_shapes, "float32" if b.float32 else dtype) for b in plan.buckets]
        self._files = msgspec.msgpack.encode(files)
        self._base: list[np.ndarray] = [np.empty(0, np.uint8) for _ in files]
        """The last version by bucket, uint8."""
        self._version: int | None = None
        """Which one that is; None while it changes."""

    async def prepare(self, publication: Publication, buckets: Buckets) -> None:
        base, self._version = self._version, None
        held = await publication.each("held", lambda engine: engine.replica_version())
        followers = {engine.name for engine, version in held.items() if version == base is not None}
        await publication.each("open", lambda engine: engine.replica_begin(self._files), moves_weights=True)
        with publication.report.timed("gather"):
            await buckets.advance()
        for number in range(len(self._base)):
            bucket = buckets.current
            assert bucket is not None
            await asyncio.gather(self._carry(publication, number, bucket, followers), buckets.advance())
        await publication.each("commit", lambda engine: engine.replica_commit(publication.version))
        self._version = publication.version

    async def update(self, publication: Publication, buckets: Buckets, *, flush_cache: bool) -> None:
        await publication.each(
            "load",
            lambda engine: engine.load_replica(flush_cache=flush_cache, version=publication.version),
            moves_weights=True,
        )

    async def _carry(
        self, publication: Publication, number: int, bucket: FlatBucket, followers: set[str]
    ) -> None:
        """One bucket to every engine, and into the base. ``followers``: the engines that have the base."""
        base, new = self._base[number], await asyncio.to_thread(_bytes_of, bucket)
        patch: bytes | None = None
        if any(engine.name in followers for engine in publication.engines):
            patch = await asyncio.to_thread(_patch, base, new, bucket.flat.itemsize)
        whole: bytes | None = None
        if any(engine.name not in followers for engine in publication.engines):
            whole = await asyncio.to_thread(_whole, new, bucket.flat.itemsize)

        async def give(engine: EngineEndpoint) -> int:
            """The bytes that were sent."""
            sent = 0
            if patch is not None and engine.name in followers:
                sent = len(patch)
                try:
                    await engine.replica_patch(number, patch)
                    return sent
                except OSError:
                    raise
                except Exception as error:  # a refusal, in the client's own words
                    log.warning("%s is sent bucket %d as a whole: %s", engine.name, number, told(error))
            everything = whole or await asyncio.to_thread(_whole, new, bucket.flat.itemsize)
            await engine.replica_patch(number, everything)
            return sent + len(everything)

        sent = await publication.each("send", give, moves_weights=True)
        publication.report.bytes_sent += max(sent.values(), default=0)
        if len(base) == len(new):
            await asyncio.to_thread(np.copyto, base, new)
        else:
            self._base[number] = new.copy()


def _bytes_of(bucket: FlatBucket) -> np.ndarray:
    return bucket.flat.view(torch.uint8).cpu().numpy()


def _patch(base: np.ndarray, new: np.ndarray, itemsize: int) -> bytes:
    return delta.encoded(delta.difference(base, new, itemsize))


def _whole(new: np.ndarray, itemsize: int) -> bytes:
    return delta.encoded(delta.whole(new, itemsize))
