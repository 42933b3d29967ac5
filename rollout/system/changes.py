"""Waiting for shared state to change, on one event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Changes:
    """Wakes the coroutines that wait for a change of state that they share.

        ticket = await changes.first(try_to_admit)      # tries now, and again after every change
        changes.notify()                                # after a change

    There is no lock, because one event loop needs none. So neither side can be cancelled halfway: ``notify``
    never waits, and a ``first`` that is cancelled or timed out has not taken anything.
    """

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        """Let every waiting coroutine try again, the longest waiting first."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def first(self, attempt: Callable[[], T | None]) -> T:
        """Return the first result of ``attempt`` that is not None. For a time-out: ``asyncio.timeout``."""
        while (result := attempt()) is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                del self._waiters[waiter]
        return result
