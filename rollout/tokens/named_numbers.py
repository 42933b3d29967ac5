"""Numbers by name, which episodes and rewards record besides what is trained, and their means."""

import math
from collections.abc import Iterable, Sequence

NamedNumbers = tuple[tuple[str, float], ...]
"""(name, value) of each number, each name once."""


def mean(values: Sequence[float]) -> float:
    """Return the mean of one or more numbers, which is finite if they are, and lies between them."""
    if not all(map(math.isfinite, values)):
        return sum(values)
    try:
        rounded = math.fsum(values) / len(values)
    except OverflowError:  # the sum is too large for a float
        rounded = math.fsum(value / len(values) for value in values)
    return min(max(rounded, min(values)), max(values))


def by_name(numbers: Iterable[NamedNumbers]) -> dict[str, list[float]]:
    """Return the values of each name, over those that have it."""
    values: dict[str, list[float]] = {}
    for each in numbers:
        for name, value in each:
            values.setdefault(name, []).append(value)
    return values


def means_by_name(numbers: Iterable[NamedNumbers]) -> dict[str, float]:
    """Return the mean of the values of each name, over those that have it."""
    return {name: mean(values) for name, values in by_name(numbers).items()}
