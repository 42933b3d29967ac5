"""The exported buckets, each made while the previous one is sent."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from slipstream.bridge.hf.bucket import FlatBucket

T = TypeVar("T")


class BucketStream:
    """An asynchronous view of an export.

    All ranks follow the same plan, so a sender that stops early leaves the other ranks blocked in their
    sends. ``exhaust`` must therefore be called on every path.
    """

    def __init__(self, buckets: Iterator[FlatBucket | None], thread: ThreadPoolExecutor) -> None:
        """``thread``: an executor with one thread, in which the buckets are made."""
        self._buckets = buckets
        self._thread = thread
        self.current: FlatBucket | None = None
        """None before the first bucket and after the last one."""

    async def advance(self) -> None:
        """Make the next bucket the current one. It may reuse the memory of the bucket before this one."""
        self.current = await self._in_thread(lambda: next(self._buckets, None))

    async def hand_over(self, work: Callable[[Iterator[FlatBucket | None]], T]) -> T:
        """Return the result of ``work``, which may block, on the remaining buckets."""
        return await self._in_thread(lambda: work(self._buckets))

    async def exhaust(self) -> None:
        # In the same thread, because it may still be making a bucket.
        await self.hand_over(lambda buckets: deque(buckets, 0))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
