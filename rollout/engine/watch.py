"""Asks a server again and again whether it is well: one that stands still ends no connection.

every few seconds ──► healthy() ──► yes
                          └── no ──► unless this process has stood still itself: why
"""

import asyncio
from typing import Protocol

from slipstream.rollout.engine.connection import EngineAddress

LONGEST_PAUSE_S = 5.0
"""Longest time between two questions."""

STOOD_STILL = 1.5
"""An answer that is missed by so many times its time-out was not read: this process did not run."""


class WatchedServer(Protocol):
    """The part of ``EngineClient`` that is needed."""

    address: EngineAddress

    async def healthy(self) -> bool: ...


async def unwell(client: WatchedServer) -> str:
    """Wait until a server does not say that it is well. Return a sentence that tells of it."""
    clock = asyncio.get_running_loop().time
    timeout_s = client.address.answer_timeout_s
    while True:
        await asyncio.sleep(min(LONGEST_PAUSE_S, timeout_s / 4))
        began = clock()
        if not await client.healthy() and clock() - began < STOOD_STILL * timeout_s:
            return f"it does not say within {timeout_s:g} s that it is well"
