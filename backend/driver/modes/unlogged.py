"""A listener for a run that trains nothing: the user hears its notes, and there are no metrics."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.backend.monitor.progress import Progress
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.tokens.trajectory import TrajectoryHeader


@dataclass(frozen=True)
class Unlogged:
    """Implements ``rollout.collection.driver.listener.CollectionListener``."""

    progress: Progress

    def note(self, text: str) -> None:
        self.progress.note(text)

    def attempt_failed(self, prompt: int, attempt: int, error: str) -> None:
        """Do nothing: there are no episodes."""

    def lost(self, loss: Loss, trajectories: Sequence[TrajectoryHeader], reason: str = "") -> None:
        """Do nothing: there are no groups."""
