"""Metrics whose names users choose: numbers of rewards and of workflows."""

from collections.abc import Callable, Iterable, Mapping

from slipstream.backend.monitor.metrics import Value
from slipstream.rollout.tokens.named_numbers import NamedNumbers, by_name, mean_of

MOST_NAMES = 128
"""Largest number of different names under one tag in one process. Each is a chart: names that are made from
data would otherwise fill metrics, TensorBoard and memory."""


def spread(numbers: Iterable[NamedNumbers]) -> dict[str, float]:
    """Return the mean of each name as NAME, and its extremes as NAME/min and NAME/max."""
    spreads: dict[str, float] = {}
    for name, values in by_name(numbers).items():
        spreads |= {name: mean_of(values), f"{name}/min": min(values), f"{name}/max": max(values)}
    return spreads


class BoundedNames:
    """Passes on the first ``MOST_NAMES`` names of a tag, and says once that there are more."""

    def __init__(self, tag: str, note: Callable[[str], None], most: int = MOST_NAMES) -> None:
        """``tag``: one of kind `parts` in ``TAGS``."""
        self._tag = tag
        self._note = note
        self._most = most
        self._names: set[str] = set()
        self._is_full = False

    def logged(self, numbers: Mapping[str, float]) -> dict[str, Value]:
        """Return the record of numbers by name, which may be the ones that ``spread`` returns."""
        kept = {name: value for name, value in numbers.items() if self._is_known(name.partition("/")[0])}
        return {self._tag: kept} if kept else {}

    def _is_known(self, name: str) -> bool:
        if name in self._names:
            return True
        if len(self._names) < self._most:
            self._names.add(name)
            return True
        if not self._is_full:
            self._is_full = True
            prefix = self._tag.removesuffix("parts")
            self._note(
                f"{prefix}{name} is not logged, nor is any further new name: there are {self._most} already. "
                "Names of metrics must not be made from data"
            )
        return False
