"""The port through which collection reports lost work, for statistics."""

from collections.abc import Sequence
from typing import Protocol

from slipstream.rollout.control.ends import Loss
from slipstream.rollout.tokens.trajectory import TrajectoryHeader


class CollectionListener(Protocol):
    """Hears of work that was lost. Its methods return at once and never raise."""

    def lost(self, loss: Loss, trajectories: Sequence[TrajectoryHeader], reason: str = "") -> None:
        """A group has ended untrained; ``trajectories`` are the finished ones of it.

        ``reason``: what has failed, with the traceback where there is one.
        """
        ...

    def attempt_failed(self, prompt: int, attempt: int, error: str) -> None:
        """Attempt number ``attempt``, counted from 1, at an episode of prompt ``prompt`` has failed."""
        ...

    def note(self, text: str) -> None:
        """Tell the user something that does not end the run."""
        ...
