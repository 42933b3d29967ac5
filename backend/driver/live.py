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

from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.engine.key import Key
from slipstream.rollout.handover.address import DriverAddress
from slipstream.rollout.ledger.restart import Recovered


class Receiver(Protocol):
    """The driver's end of the connections with gateways: ``rollout.handover.receiver.GatewayReceiver``."""

    def serving(self, host: str) -> AbstractAsyncContextManager[str]:
        """Listen on ``host`` inside the block, and give the URL."""
        ...

    async def failed(self) -> None:
        """Wait until something has failed for a reason that is not one gateway's. Raises that."""
        ...


class Watched(Protocol):
    """Something that is kept running: ``driver.gateways.Gateways``."""

    async def run(self) -> None:
        """Ends by cancellation only."""
        ...

    async def stop(self) -> None: ...


class Turns(Protocol):
    """What becomes of turns between their intake and their training: judging, mixing, their ends."""

    async def run(self) -> None:
        """Judge turns, and end waits that take too long. Ends by cancellation only."""
        ...

    async def called_off(self) -> None:
        """Stop judging, and record nothing of turns until ``restored``. What arrives meanwhile waits."""
        ...

    def restored(self, recovered: Recovered, control: RolloutControl) -> None:
        """Go on with the turns of ``recovered.live``, which enter ``control`` anew: the trainer was restored.

        Then take in what has arrived meanwhile.
        """
        ...


class LiveUsers:
    """The parts of the live loop, in their order. Single event loop."""

    def __init__(self, receiver: Receiver, gateways: Watched, turns: Turns, run: Path, key: Key) -> None:
        """``run``: run folder. ``key``: secret that gateways show to the receiver."""
        self._receiver = receiver
        self._gateways = gateways
        self.turns = turns
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
                tasks.create_task(self.turns.run(), name="turns of live users")

    async def stop(self) -> None:
        """End every gateway."""
        await self._gateways.stop()
