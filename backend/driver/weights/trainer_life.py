"""Tells whether the trainer lives to all parts that have to know it.

its callers ──fail──► LOST ──► revival: killed, started again, restored ──restored──► ALIVE
                       │                                                     │
                       └──── training, engines to be brought up to date: wait ┘
"""

from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.rollout.system.changes import Changes


class TrainerLife:
    """Single event loop."""

    def __init__(self) -> None:
        self._error: TrainerFailed | None = None
        self.incarnation = 0
        """Number of times that the trainer was restored."""
        self._changes = Changes()

    @property
    def is_alive(self) -> bool:
        """True unless the trainer has failed and was not restored since."""
        return self._error is None

    def fail(self, error: TrainerFailed) -> None:
        """Note that the trainer has failed. Of several reasons, the first one counts."""
        if self._error is None:
            self._error = error
            self._changes.notify()

    def restored(self) -> None:
        """Note that a new trainer has the state of a checkpoint, which the engines serve, too."""
        self._error = None
        self.incarnation += 1
        self._changes.notify()

    async def lost(self) -> TrainerFailed:
        """Wait until the trainer has failed. Return the reason."""
        return await self._changes.first(lambda: self._error)

    async def alive(self) -> None:
        """Wait until the trainer is alive. Its restart has time-outs."""
        await self._changes.first(lambda: self.is_alive or None)
