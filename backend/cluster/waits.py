"""Waits that end: every one has a time-out, and its error names what was waited for."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Timeout(TimeoutError):
    """A wait took too long; the message names it."""


async def within(seconds: float, what: str, work: Awaitable[T]) -> T:
    """Return the result of ``work``. Raises Timeout that names ``what`` after ``seconds``."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        raise Timeout(f"{what} took more than {seconds:.0f} s") from None


@asynccontextmanager
async def first_of(
    one: Coroutine[None, None, T], other: Coroutine[None, None, U]
) -> AsyncIterator[tuple[asyncio.Task[T], asyncio.Task[U]]]:
    """Wait for either coroutine, and cancel what has not ended by the end of the block."""
    first, second = asyncio.ensure_future(one), asyncio.ensure_future(other)
    try:
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        yield first, second
    finally:
        for task in (first, second):
            task.cancel()
        await asyncio.wait({first, second})
