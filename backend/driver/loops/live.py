"""Live users: what their gateways record comes in, is judged, and waits to be trained.

    gateway processes ──entries──► receiver ──► intake ──► ledger ──► judging ──► control core: turns
           ▲                          │
           └── engines, durable numbers

The loop waits for no training step, and no training step waits for it: turns enter the control core by their
own door. Each part is a task of its own. ``gateways`` keeps the processes; one that is gone takes nothing
with it but its connection. What the ledger raises ends the run, as everywhere.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from slipstream.rollout.live.driver_address import DriverAddress
from slipstream.rollout.system.key import Key


class Receiver(Protocol):
    """The driver's end of the connections with gateways: ``rollout.live.receiver.GatewayReceiver``."""

    def serving(self, host: str) -> AbstractAsyncContextManager[str]:
        """Listen on ``host`` inside the block, and give the URL."""
        ...

    async def failed(self) -> None:
        """Wait until something has failed for a reason that is not one gateway's. Raises that."""
        ...


class JudgingLoop(Protocol):
    """The judging of turns: ``rollout.live.judging.LiveJudging``."""

    async def run(self) -> None:
        """Ends by cancellation only."""
        ...


class GatewayProcesses(Protocol):
    """The processes that users reach: ``driver.gateways.Gateways``."""

    async def run(self) -> None:
        """Ends by cancellation only."""
        ...

    async def stop(self) -> None: ...


class LiveUsers:
    """The parts of the live loop, in their order. Single event loop."""

    def __init__(
        self, receiver: Receiver, gateways: GatewayProcesses, judging: JudgingLoop | None, run: Path, key: Key
    ) -> None:
        """``judging``: None if nothing is trained. ``run``: run folder. ``key``: secret that gateways show to
        the receiver.
        """
        self._receiver = receiver
        self._gateways = gateways
        self._judging = judging
        self._run = run
        self._key = key

    async def keep(self, host: str, announced: Callable[[str], None] = lambda url: None) -> None:
        """Listen on ``host``, keep the gateways running and their turns judged. Ends by cancellation only.

        The gateways go on until ``stop``, so that a run which fails here answers its users until then.
        ``announced`` hears of the URL.
        """
        async with self._receiver.serving(host) as url:
            DriverAddress(url, self._key).write(self._run)
            announced(url)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receiver.failed(), name="messages of gateways")
                tasks.create_task(self._gateways.run(), name="gateways")
                if self._judging is not None:
                    tasks.create_task(self._judging.run(), name="judging of live turns")

    async def stop(self) -> None:
        """End every gateway."""
        await self._gateways.stop()
