"""Threads for what takes long about a request before it runs: its template and its tokens.

The event loop serves all users, and must not stand still for one of them. Python's threads take turns every
few milliseconds, and the tokenizer's own code runs beside them. One request of a key is read and prepared at
a time: a user who sends many takes one thread, and only one of them is in memory as objects, of which there
are ten times the bytes that were sent.
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


class _Key(asyncio.Lock):
    """The requests of a key, of which one at a time has its turn."""

    waiting = 0
    """Bytes of those that wait for it."""


class KeyTurn:
    """The turn of one request, from before it is read until it is prepared. Single event loop.

    Whoever has it calls ``give_up`` in the end, whatever happens.
    """

    def __init__(self, key: _Key, threads: ThreadPoolExecutor) -> None:
        self._key = key
        self._threads = threads
        self._is_held = self._works = False

    async def taken(self, size: int) -> None:
        """Wait for it. Raises Refusal with 429 if too much of the key waits.

        ``size``: bytes of the request.
        """
        key = self._key
        if key.waiting + size > MOST_WAITING:
            raise Refusal(429, "too many long requests of this key wait; try again", retry_after_s=1.0)
        key.waiting += size
        try:
            self._is_held = await key.acquire()
        finally:
            key.waiting -= size

    async def run(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, in a thread, and end the turn. Raises what it raises.

        Work that has begun goes on to its end, though its caller is cancelled, and keeps the turn.
        """
        self._works = True
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(lambda _: self._end())
        try:
            return await asyncio.shield(running)
        finally:
            del running  # the frames of an error in it have the request, and this one would have the error

    def give_up(self) -> None:
        """End the turn, unless work does, or has."""
        if not self._works:
            self._end()

    def _end(self) -> None:
        if self._is_held:
            self._is_held = False
            self._key.release()


class Workers:
    """The threads of a process. Single event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")
        self._keys: WeakValueDictionary[str, _Key] = WeakValueDictionary()

    def turn(self, name: str) -> KeyTurn:
        """Return the turn of a request of a key, which it has yet to take."""
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = _Key()
        return KeyTurn(key, self._threads)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
