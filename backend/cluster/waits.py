"""Waits that end: every one has a time-out, and its error names what was waited for."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Timeout(TimeoutError):
    """A wait took too long; the message names it."""


async def within(seconds: float, what: str, work: Awaitable[T]) -> T:
    """Return the result of ``work``. Raises Timeout that names ``what`` after ``seconds``."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        raise Timeout(f"{what} took more than {seconds:.0f} s") from None
