"""Serving: engines that hold the current policy version, and as many requests as they have room for.

    start ──► bring up to date ──► in the roster ──lost or condemned──► start again    (one task an engine)
    load of the engines ──► concurrency controller ──► limit of the roster             (every two seconds)

An engine that starts or restarts holds nobody up but, at the beginning of a run, the run itself. Requests of
a lost engine go on elsewhere with the tokens they have; without any engine they wait
(``rollout.engine.start_timeout_s``). Back-pressure is the roster's limit on running requests, which the
collectors share.

waits for       an engine that starts, ends or is condemned (``Supervisor.run``); at first, for ``training``
unblocked by    the engines' actors and ``EngineRoster.condemn``; ``training.set()`` in the course of the run
"""

import asyncio
from collections.abc import Sequence

from slipstream.rollout.control.concurrency import ConcurrencyController, EngineLoad
from slipstream.rollout.engine.client import EngineClient, EngineError, EngineLost
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.supervisor import Supervisor

SAMPLE_TIMEOUT_S = 5.0
"""Longest time of a sample: a later one describes another moment than the samples of the other engines."""


async def serving_loop(
    supervisor: Supervisor,
    roster: EngineRoster,
    controller: ConcurrencyController | None,
    serving: asyncio.Event,
    training: asyncio.Event,
) -> None:
    """Keep the engines serving. Sets ``serving`` once every engine has started. Ends by cancellation only.

    ``controller`` adapts the concurrency to the engines' load once ``training`` is set; None leaves it fixed.
    """
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run(serving), name="supervisor")
        if controller is not None:
            await training.wait()
            await follow_load(roster, controller)


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
