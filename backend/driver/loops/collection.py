"""Collection: slots in, groups out.

    collectors connect ──► assignments ──► events on disk ──► gate: ready | filtered | failed
                             ▲                                      │
                             └─── a slot is free again ◄────────────┘  at once when lost, else when trained

The loop never waits for training, only for a slot: at most (eta + 1) * batch_size groups exist at one time.
Within that, each collector holds as many episodes as its engines may run, and a few more. Episodes run in the
collectors' processes: nothing of a user's code stands in the way of this loop.

waits for       ``gate.changed``: slots or prompts may have come, or groups were given up
unblocked by    ``gate.trained`` (the slots of a batch), ``gate.filtered`` and ``gate.failed`` (the slot of
                a group), ``gate.notify`` (a data source), ``gate.restored`` (the trainer was)
"""

import asyncio

from slipstream.backend.driver.processes.collectors import Collectors
from slipstream.rollout.collection.driver.assignments import Assignments
from slipstream.rollout.collection.driver.gate import AdmissionGate
from slipstream.rollout.collection.driver.server import CollectorServer


async def keep_collecting(server: CollectorServer, collectors: Collectors, host: str) -> None:
    """Keep the collectors running and connected. Ends by cancellation only, and they end with it."""
    async with server.serving(host) as url, asyncio.TaskGroup() as tasks:
        tasks.create_task(collectors.run(url), name="collectors")
        tasks.create_task(server.failed(), name="messages of collectors")


async def collection_loop(gate: AdmissionGate, assignments: Assignments) -> None:
    """Assign a group whenever a slot is free, and take back what has expired. Ends by cancellation only."""
    assignments.open()
    while True:
        assignments.give_up(await gate.changed())
        assignments.grant()
