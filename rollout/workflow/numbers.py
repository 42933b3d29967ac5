"""Numbers that a workflow records of one attempt at an episode, by name."""

from dataclasses import replace
from typing import SupportsFloat

from slipstream.rollout.reward.value import MOST_PARTS, NoNumber, is_name, number_of
from slipstream.rollout.tokens.trajectory import Trajectory


class MetricError(ValueError):
    """A workflow records something that is no metric."""


class EpisodeNumbers:
    """The numbers of one attempt at an episode. Later values replace earlier ones of the same name."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def record(self, name: object, value: SupportsFloat) -> None:
        """Record a number. Raises MetricError, and whatever a type of the user's raises."""
        if not isinstance(name, str) or not is_name(name):
            raise MetricError(
                f"a metric is named {_short(name)}, expected at most 64 letters, digits, `_`, `-` and `.`"
            )
        try:
            number = number_of(value)
        except NoNumber:
            kind = type(value).__name__
            raise MetricError(
                f"the metric {name!r} is {_short(value)} of type {kind}, expected a finite number: leave it "
                "out where there is none"
            ) from None
        if name not in self._values and len(self._values) >= MOST_PARTS:
            raise MetricError(
                f"the metric {name!r} is number {MOST_PARTS + 1} of its episode, expected {MOST_PARTS} names "
                "at most"
            )
        self._values[name] = number

    def attached(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory of the episode with what was recorded."""
        return replace(trajectory, metrics=tuple(self._values.items())) if self._values else trajectory


def _short(value: object) -> str:
    """Return a value as a message shows it, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
