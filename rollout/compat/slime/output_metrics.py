"""The metrics of what slime's functions for whole batches return, as numbers of episodes."""

import re
import sys
from collections.abc import Mapping
from typing import Any, cast

from slipstream.rollout.compat.slime.episode_samples import WrongReturn
from slipstream.rollout.reward.value import MOST_PARTS, number_of
from slipstream.rollout.tokens.named_numbers import NamedNumbers

LONGEST_NAME = 64
"""Characters of the name of a metric."""

_NO_NAME = re.compile(r"[^\w.-]")


class OutputMetrics:
    """Reads the metrics of the outputs of one function."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._left_out: set[str] = set()

    def read(self, output: object) -> NamedNumbers:
        """Return the numbers of an output. What stands between names is `.`: ``rollout/drops`` becomes
        ``rollout.drops``.

        What is no number, and what there is beyond MOST_PARTS names, is left out, and said once in the log of
        the process. Raises WrongReturn.
        """
        given: object = getattr(output, "metrics", None)
        if given is None:
            return ()
        if not isinstance(given, Mapping):
            kind = type(given).__name__
            raise WrongReturn(f"{self._path} returned metrics of type {kind}, expected numbers by name")
        numbers: dict[str, float] = {}
        for name, value in cast("Mapping[Any, Any]", given).items():
            shown = _NO_NAME.sub(".", str(name))[:LONGEST_NAME]
            try:
                number = number_of(value)
            except Exception:  # a value of any type
                self._leave_out(shown, f"{type(value).__name__}, which is no finite number")
                continue
            if not shown or (shown not in numbers and len(numbers) >= MOST_PARTS):
                self._leave_out(shown, f"number {MOST_PARTS + 1} or later")
            else:
                numbers[shown] = number
        return tuple(numbers.items())

    def _leave_out(self, name: str, reason: str) -> None:
        if name not in self._left_out and len(self._left_out) < MOST_PARTS:
            self._left_out.add(name)
            print(f"{self._path}: the metric {name!r} is not logged: {reason}", file=sys.stderr, flush=True)
