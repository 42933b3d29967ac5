"""The port through which collection reports lost work, for statistics."""

from collections.abc import Sequence
from typing import Protocol

from slipstream.rollout.control.core import Loss
from slipstream.rollout.trajectory import Prompt, Trajectory


class CollectionListener(Protocol):
    """Hears of work that was lost. Its methods return at once and never raise."""

    def lost(self, loss: Loss, trajectories: Sequence[Trajectory]) -> None:
        """A group has ended untrained; ``trajectories`` are the finished ones of it."""
        ...

    def episode_failed(self, prompt: Prompt, attempt: int, error: Exception) -> None:
        """Attempt number ``attempt``, counted from 1, at an episode of ``prompt`` has raised ``error``."""
        ...
