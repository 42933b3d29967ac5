"""Send each bucket through memory that the sender shares with the engines on its node.

The sender copies a bucket there once, however many engines and ranks receive it. The handles are those of
``torch.multiprocessing``, which SGLang reads. Each rank gets its own, because opening a handle consumes it.
"""

import asyncio
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.multiprocessing
from torch import Tensor

from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.publish.bucket_stream import BucketStream
from slipstream.bridge.publish.publication import Publication


@dataclass(frozen=True)
class _Shared:
    """A bucket in shared memory."""

    bucket: FlatBucket
    memory: Tensor
    """uint8 [bytes]"""

    def handle(self) -> bytes:
        """Return a handle in SGLang's format of flattened buckets."""
        dtype = self.bucket.flat.dtype
        sizes = [prod(shape) * dtype.itemsize for shape in self.bucket.shapes]
        metadata = [
            SimpleNamespace(
                name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start
            )
            for name, shape, (start, end) in zip(
                self.bucket.names, self.bucket.shapes, pairwise(accumulate(sizes, initial=0)), strict=True
            )
        ]
        return bytes(ForkingPickler.dumps({"flattened_tensor": self.memory, "metadata": metadata}))


class TensorTransport:
    """Keeps shared memory for two buckets: the engines read one while the next is copied."""

    def __init__(self) -> None:
        # SGLang accepts no connection for file descriptors, so memory is shared by the name of a file.
        torch.multiprocessing.set_sharing_strategy("file_system")  # pyright: ignore[reportUnknownMemberType]
        self._spaces = [torch.empty(0, dtype=torch.uint8)] * 2
        self._next: _Shared | None = None

    async def prepare(self, publication: Publication, buckets: BucketStream) -> None:
        with publication.report.timed("gather"):
            await self._advance(buckets)

    async def update(self, publication: Publication, buckets: BucketStream) -> None:
        await publication.each("begin", lambda engine: engine.begin_update())
        while (shared := self._next) is not None and publication.engines:
            await asyncio.gather(self._send(publication, shared), self._advance(buckets))
        await publication.each("end", lambda engine: engine.end_update())

    async def _send(self, publication: Publication, shared: _Shared) -> None:
        last = shared.bucket.last
        await publication.each(
            "send",
            lambda engine: engine.take(
                [shared.handle() for _ in range(engine.ranks)],
                load_format="flattened_bucket",
                version=publication.version if last else None,
            ),
            moves_weights=True,
        )
        publication.report.bytes_sent += shared.memory.nbytes

    async def _advance(self, buckets: BucketStream) -> None:
        await buckets.advance()
        bucket = buckets.current
        self._next = None if bucket is None else _Shared(bucket, await asyncio.to_thread(self._share, bucket))

    def _share(self, bucket: FlatBucket) -> Tensor:
        source = bucket.flat.view(torch.uint8)
        space, self._spaces = self._spaces[0], self._spaces[1:]
        if space.numel() < source.numel():
            space = torch.empty(source.numel(), dtype=torch.uint8)
            space.share_memory_()
        self._spaces.append(space)
        return space[: source.numel()].copy_(source)
