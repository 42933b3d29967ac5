"""The account of an optimizer update that was skipped, because a loss or a gradient is not finite. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

COUNTERS = ("train/skipped_updates", "critic/skipped_updates")
"""Metrics that count the skipped updates of a training step."""

SHOWN = 4
"""Number of trajectories and of parameters that a text names; the others are counted."""


@dataclass(frozen=True)
class FaultyTrajectory:
    """A trajectory with a number that is not finite."""

    place: int
    """Place in the batch."""
    group: int
    numbers: tuple[str, ...]
    """Names of its numbers that are not finite, inputs first."""

    def __str__(self) -> str:
        return f"trajectory {self.place} of the batch (group {self.group}): {', '.join(self.numbers)}"


@dataclass(frozen=True)
class SkippedUpdate:
    """An optimizer update that no rank has made."""

    model: str
    """Model whose weights stay as they are: policy, critic or reward model."""
    minibatch: int
    """Number of the mini-batch within the training step, from 1."""
    trajectories: tuple[FaultyTrajectory, ...]
    """Trajectories whose inputs or loss are not finite; empty if only gradients are not."""
    parameters: tuple[str, ...]
    """Parameters with gradients that are not finite, with their rank. Empty if a trajectory is the cause:
    every gradient is affected then."""

    def __str__(self) -> str:
        update = f"the update of the {self.model} for mini-batch {self.minibatch} was skipped"
        if self.trajectories:
            faulty = shortened([str(trajectory) for trajectory in self.trajectories], "; ")
            return f"{update}, because these numbers are not finite: {faulty}"
        if self.parameters:
            names = shortened(self.parameters, ", ")
            return f"{update}, because the gradients of these parameters are not finite: {names}"
        return f"{update}, because the norm of its gradient overflows"


def shortened(names: Sequence[str], separator: str) -> str:
    """Return the first names, and the number of the others."""
    more = len(names) - SHOWN
    return separator.join(names[:SHOWN]) + (f"{separator}and {more} more" if more > 0 else "")
