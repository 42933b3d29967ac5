"""``run``: a coroutine from code that is not one."""

import asyncio
import threading
from functools import cache

__all__ = ["get_async_loop", "run"]


class AsyncLoopThread:
    """An event loop in a thread of its own, for as long as the process lives."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="slime hooks", daemon=True).start()

    def run(self, coro):
        return asyncio.run_coroutine_threadsafe(coro, self.loop).result()


@cache
def get_async_loop() -> AsyncLoopThread:
    return AsyncLoopThread()


def run(coro):
    """Wait for ``coro`` in the background loop and return its result. Not to be called from that loop."""
    return get_async_loop().run(coro)
