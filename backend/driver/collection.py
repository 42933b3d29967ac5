"""Collection: slots in, groups out.

    gate.slot ──► collector.collect: n episodes ──► gate: finished | filtered | failed
        ▲                                                    │
        └─────────── a slot is free again ◄──────────────────┘  at once when lost, else when trained

The loop never waits for training, only for a slot: at most (eta + 1) * batch_size groups exist at one time.
Within that, the engine pool runs ``rollout.max_concurrent`` requests and queues the others.
"""

import asyncio

from slipstream.rollout.collect.gate import AdmissionGate
from slipstream.rollout.collect.groups import GroupCollector
from slipstream.rollout.collect.running import RunningGroups


async def collection_loop(gate: AdmissionGate, collector: GroupCollector, running: RunningGroups) -> None:
    """Start a group whenever a slot is free. Ends by cancellation only, and its groups end with it."""
    async with asyncio.TaskGroup() as groups:
        while True:
            assignment = await gate.slot()
            running.add(assignment.ticket.id, groups.create_task(collector.collect(assignment)))
