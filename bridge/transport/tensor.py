"""Send whole HF tensors through memory that the engines on the sender's node read.

    export ─► bucket ─┬─► memory of the GPU, if a rank can open it (CUDA IPC) ─► order ─► answer: it is loaded
                      └─► host memory, for the other ranks (two: one is read while the next one is filled)

The sender copies a bucket once, however many engines and ranks read it. An order says where the bucket lies
(``engine.orders.Load``). It carries no weights and travels to the engine's own server, with the server's key.
An engine answers when none of its ranks reads the bucket any more. Memory for which an answer is missing is
never filled again.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.bridge.engine import orders
from slipstream.bridge.engine.memory_reader import located
from slipstream.bridge.engine.orders import DevicePlace, Meeting
from slipstream.bridge.group.handles import Handle
from slipstream.bridge.group.memory import DeviceMemory, HostMemory, on
from slipstream.bridge.group.store import serve_store
from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.publish.bucket_stream import BucketStream
from slipstream.bridge.publish.endpoint import EngineEndpoint
from slipstream.bridge.publish.publication import Publication
from slipstream.bridge.transport.ordering import Ordering
from slipstream.bridge.transport.ways import UnsuitedTransport, Way, explained, way_to

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

LOOPBACK = "127.0.0.1"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Reader:
    """An engine whose ranks have said where they are."""

    ordering: Ordering
    ways: tuple[Way, ...]
    """By rank."""


@dataclass
class _Outgoing:
    bucket: FlatBucket
    host: HostMemory | None
    """None: no rank is known to read host memory."""


class TensorTransport:
    """Lives on the sender for the whole run. Keeps host memory for two buckets, if a rank reads any.

    Memory of the GPU for one bucket is there during an update only: a trainer that rests gives it up.
    """

    def __init__(self, device: torch.device) -> None:
        """``device``: of the exported buckets."""
        self._device = device
        self._store: TCPStore | None = None
        """Engines leave their answers in it."""
        self._here = located(device)
        self._readers: dict[Hashable, _Reader] = {}
        self._hosts: list[HostMemory] = []
        """The one that was filled last comes last."""
        self._gpu: DeviceMemory | None = None
        self._refused = device.type != "cuda"
        """No memory of this GPU can be offered."""
        self._next: _Outgoing | None = None
        self._names = itertools.count()
        self._unsuited: str | None = None

    async def prepare(self, publication: Publication, buckets: BucketStream) -> None:
        with publication.report.timed("gather"):
            await self._advance(buckets)

    async def update(self, publication: Publication, buckets: BucketStream) -> None:
        await publication.each("begin", lambda engine: engine.begin_update())
        try:
            await self._locate_new(publication)
            while (outgoing := self._next) is not None and publication.engines:
                await self._send_and_advance(publication, outgoing, buckets)
        finally:
            self._free_gpu()
            self._forget_failed(publication)
        await publication.each("end", lambda engine: engine.end_update())
        await publication.each("stamp", lambda engine: engine.rename_version(publication.version))

    # ---- engines

    async def _locate_new(self, publication: Publication) -> None:
        """Ask the engines that this sender has not met yet where they are, and choose their ways."""
        new = [engine for engine in publication.engines if engine.address not in self._readers]
        if not new:
            return
        if self._next is not None:
            await asyncio.to_thread(self._offer_gpu, self._next.bucket.flat.nbytes)
        meeting = self._meeting(publication.timeouts.transfer_s)
        # A connection to the store may take seconds, which are not the engine's.
        lines = await asyncio.gather(*(self._connected(engine, meeting) for engine in new))
        orderings = dict(zip(new, lines, strict=True))
        timeout_s = publication.timeouts.answer_s

        async def locate(engine: EngineEndpoint) -> None:
            if engine in orderings:
                await self._locate(engine, orderings[engine], meeting, timeout_s)

        await publication.each("locate", locate)
        publication.report.unsuited = self._unsuited

    async def _connected(self, engine: EngineEndpoint, meeting: Meeting) -> Ordering:
        self._forget(lambda reader: reader.ordering.engine == engine.name)
        name = f"{engine.name}/{next(self._names)}"
        return await asyncio.to_thread(Ordering, meeting, engine.name, name)

    def _meeting(self, timeout_s: float) -> Meeting:
        if self._store is None:
            self._store = serve_store(LOOPBACK, 0, 1, timeout_s, wait=False)
        return Meeting(LOOPBACK, self._store.port, timeout_s)

    async def _locate(
        self, engine: EngineEndpoint, ordering: Ordering, meeting: Meeting, timeout_s: float
    ) -> None:
        trial = None if self._gpu is None else self._gpu.handle
        ordered = [orders.Locate(meeting, ordering.name, trial)] * engine.ranks
        try:
            answers = await ordering.carried_out(engine, ordered, timeout_s)
            places = [answer.place for answer in answers if answer.place is not None]
            ways: list[Way] = [self._way(engine, rank, place) for rank, place in enumerate(places)]
        except BaseException:
            ordering.close()
            raise
        self._readers[engine.address] = _Reader(ordering, tuple(ways))

    def _way(self, engine: EngineEndpoint, rank: int, place: DevicePlace) -> Way:
        try:
            way = way_to(place, self._here, offers_gpu=self._gpu is not None)
        except UnsuitedTransport as error:
            self._unsuited = f"{engine.name}, rank {rank}: {error}"
            raise UnsuitedTransport(self._unsuited) from None
        log.info("%s, rank %d %s", engine.name, rank, explained(place, self._here, way))
        return way

    def _forget_failed(self, publication: Publication) -> None:
        """Forget the engines that have dropped out. They come back under other addresses."""
        failed = publication.report.failed
        self._forget(lambda reader: reader.ordering.engine in failed)

    def _forget(self, which: Callable[[_Reader], bool]) -> None:
        for address, reader in list(self._readers.items()):
            if which(reader):
                del self._readers[address]
                reader.ordering.close()

    # ---- buckets

    async def _advance(self, buckets: BucketStream) -> None:
        await buckets.advance()
        bucket = buckets.current
        if bucket is None:
            self._next = None
            return
        known = self._device.type != "cuda" or any(_by_host(reader) for reader in self._readers.values())
        host = await asyncio.to_thread(self._fill_host, bucket.flat) if known else None
        self._next = _Outgoing(bucket, host)

    async def _send_and_advance(
        self, publication: Publication, outgoing: _Outgoing, buckets: BucketStream
    ) -> None:
        """Send one bucket while the next one is made. The first failure ends both."""
        tasks = [
            asyncio.ensure_future(self._send(publication, outgoing)),
            asyncio.ensure_future(self._advance(buckets)),
        ]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._retire(outgoing)
            raise

    async def _send(self, publication: Publication, outgoing: _Outgoing) -> None:
        bucket, engines = outgoing.bucket, publication.engines
        readers = {engine: self._readers[engine.address] for engine in engines}
        memory = await asyncio.to_thread(self._filled, outgoing, list(readers.values()))
        number, tensors = next(self._names), _described(bucket)
        meeting = self._meeting(publication.timeouts.transfer_s)

        async def send_to(engine: EngineEndpoint) -> None:
            ordering, ways = readers[engine].ordering, readers[engine].ways
            ordered = [orders.Load(meeting, ordering.name, number, memory[way], tensors) for way in ways]
            await ordering.carried_out(engine, ordered, publication.timeouts.answer_s)

        await publication.each("send", send_to, moves_weights=True)
        publication.report.bytes_sent += bucket.flat.nbytes
        publication.report.ways = dict(Counter(way for reader in readers.values() for way in reader.ways))
        if len(publication.engines) < len(engines):
            self._retire(outgoing)

    # ---- memory

    def _fill_host(self, flat: Tensor) -> HostMemory:
        memory = self._hosts.pop(0) if len(self._hosts) > 1 else None
        if memory is not None and memory.nbytes < flat.nbytes:
            memory.close()
            memory = None
        if memory is None:
            memory = HostMemory(flat.nbytes, pinned=self._device.type == "cuda")
        self._hosts.append(memory)
        with on(self._device):
            memory.tensor[: flat.nbytes].copy_(flat.view(torch.uint8))
        return memory

    def _filled(self, outgoing: _Outgoing, readers: Sequence[_Reader]) -> dict[Way, Handle]:
        """Return the memory in which each way finds the bucket."""
        flat = outgoing.bucket.flat
        gpu = self._fill_gpu(flat) if any("cuda_ipc" in reader.ways for reader in readers) else None
        # The ranks may not have been known when the bucket was made, or the GPU may have run out of memory.
        if outgoing.host is None and (gpu is None or any(map(_by_host, readers))):
            outgoing.host = self._fill_host(flat)
        host = outgoing.host.handle if outgoing.host is not None else None
        found: dict[Way, Handle | None] = {"cuda_ipc": gpu or host, "pinned": host, "shared": host}
        return {way: handle for way, handle in found.items() if handle is not None}

    def _fill_gpu(self, flat: Tensor) -> Handle | None:
        """Return None if the GPU has no room."""
        self._offer_gpu(flat.nbytes)
        if self._gpu is None:
            return None
        self._gpu.fill(flat)
        return self._gpu.handle

    def _offer_gpu(self, nbytes: int) -> None:
        """Have memory of the GPU for a bucket, unless it is known that there cannot be any."""
        if self._refused or (self._gpu is not None and self._gpu.nbytes >= nbytes):
            return
        self._free_gpu()
        try:
            self._gpu = DeviceMemory(nbytes, self._device)
        except RuntimeError as error:
            log.warning("the engines read host memory instead of the trainer's GPU: %s", error)
            self._refused = True

    def _free_gpu(self) -> None:
        memory, self._gpu = self._gpu, None
        if memory is not None:
            memory.close()

    def _retire(self, outgoing: _Outgoing) -> None:
        """Never fill the memory of a bucket again: a rank may still read it. It goes with its last reader."""
        self._free_gpu()
        if outgoing.host in self._hosts:
            self._hosts.remove(outgoing.host)
            outgoing.host.close()


def _by_host(reader: _Reader) -> bool:
    return any(way != "cuda_ipc" for way in reader.ways)


def _described(bucket: FlatBucket) -> tuple[orders.Tensor, ...]:
    dtype = str(bucket.flat.dtype).removeprefix("torch.")
    return tuple(
        orders.Tensor(name, shape, dtype) for name, shape in zip(bucket.names, bucket.shapes, strict=True)
    )
