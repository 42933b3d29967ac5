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

from slipstream.rollout.control.concurrency import ConcurrencyController
from slipstream.rollout.engine.engine_load import follow_load
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.supervisor import Supervisor


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
