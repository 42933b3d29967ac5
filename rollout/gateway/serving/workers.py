"""Threads for what takes long about a request before it runs: reading it, its template and its tokens.

The event loop serves all users, and must not stand still for one of them. Python's threads take turns every
few milliseconds, and the tokenizer's own code runs beside them. One request of a key is prepared at a time: a
user who sends many takes one thread.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from slipstream.rollout.gateway.serving.limits import Refusal

INLINE_BYTES = 1024
"""Requests up to this length are prepared at once: to hand one to a thread takes as long."""

THREADS = 4
MOST_WAITING = 64 << 20
"""Bytes of the requests of one key that may wait to be prepared. They are kept in memory."""

T = TypeVar("T")


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that never waits. It needs no event loop: a thread can run it."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError(f"{coroutine.__qualname__} waits")


class _Turn(asyncio.Lock):
    """The turn of a key."""

    waiting = 0
    """Bytes of the requests that wait for it."""


class Workers:
    """The threads of a process. Single event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")
        self._turns: WeakValueDictionary[str, _Turn] = WeakValueDictionary()

    async def run(self, key: str, work: Callable[[], T], size: int) -> T:
        """Return what ``work`` returns, when it is the turn of a request of this key. Raises what it raises,
        and Refusal with 429 if too much of the key waits. ``size``: bytes of the request.

        Work that has begun goes on to its end, though its caller is cancelled, and keeps the turn.
        """
        turn = self._turns.get(key)
        if turn is None:
            turn = self._turns[key] = _Turn()
        if turn.waiting + size > MOST_WAITING:
            raise Refusal(429, "too many long requests of this key wait; try again", retry_after_s=1.0)
        turn.waiting += size
        try:
            await turn.acquire()
        finally:
            turn.waiting -= size
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(lambda _, turn=turn: turn.release())
        try:
            return await asyncio.shield(running)
        finally:
            del running  # the frames of an error in it have the request, and this one would have the error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
