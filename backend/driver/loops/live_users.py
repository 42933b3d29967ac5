"""Live users: what their gateways record comes in, is judged, and waits to be trained.

    gateway processes ──entries──► receiver ──► intake ──► ledger ──► judging ──► control core: turns
           ▲                          │
           └── engines, durable numbers

The loop waits for no training step, and no training step waits for it: turns enter the control core by their
own door. Each part is a task of its own. ``gateways`` keeps the processes; one that is gone takes nothing
with it but its connection. What the ledger raises ends the run, as everywhere.

waits for       entries of the gateways (``GatewayReceiver``); verdicts (``LiveJudging``)
unblocked by    the gateways' connections; the judge's answers, or their time limit
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from slipstream.backend.driver.processes.gateways import Gateways
from slipstream.rollout.live.driver_address import DriverAddress
from slipstream.rollout.live.judging import LiveJudging
from slipstream.rollout.live.receiver import GatewayReceiver
from slipstream.rollout.system.key import Key


class LiveUsers:
    """The parts of the live loop, in their order. Single event loop."""

    def __init__(
        self, receiver: GatewayReceiver, gateways: Gateways, judging: LiveJudging | None, run: Path, key: Key
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
