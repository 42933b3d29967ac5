"""Samples the load of the engines and sets the roster's limit as the concurrency controller decides."""

import asyncio
from collections.abc import Sequence

from slipstream.rollout.control.concurrency import ConcurrencyController, EngineLoad
from slipstream.rollout.engine.client import EngineClient, EngineError, EngineLost
from slipstream.rollout.engine.roster import EngineRoster

SAMPLE_TIMEOUT_S = 5.0
"""Longest time of a sample: a later one describes another moment than the samples of the other engines."""


async def sample(clients: Sequence[EngineClient]) -> dict[str, EngineLoad]:
    """Ask all engines at once. Return the loads by engine name, without engines that fail or are late."""

    async def ask(client: EngineClient) -> EngineLoad | None:
        try:
            async with asyncio.timeout(SAMPLE_TIMEOUT_S):
                return await client.load()
        except (EngineError, EngineLost, TimeoutError):
            return None

    loads = await asyncio.gather(*map(ask, clients))
    return {client.name: load for client, load in zip(clients, loads, strict=True) if load is not None}


async def follow_load(roster: EngineRoster, controller: ConcurrencyController, every_s: float = 2.0) -> None:
    """Sample, decide and set the roster's limit, forever. A failed sample is no observation, and no error."""
    version = roster.version
    seen: dict[str, EngineLoad] = {}
    while True:
        loads = await sample(roster.clients)
        if roster.version != version:
            version = roster.version
            controller.disturbed()
        # A paused engine repeats its last sample from before the pause.
        fresh = [load for name, load in loads.items() if load != seen.get(name)]
        controller.observe(fresh, in_use=roster.in_use)
        roster.limit, seen = controller.limit, loads
        await asyncio.sleep(every_s)
