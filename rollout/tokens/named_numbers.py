"""Numbers by name, which episodes and rewards record besides what is trained, and their means."""

from collections.abc import Iterable, Sequence

NamedNumbers = tuple[tuple[str, float], ...]
"""(name, value) of each number, each name once."""


def by_name(numbers: Iterable[NamedNumbers]) -> dict[str, list[float]]:
    """Return the values of each name, over those that have it."""
    values: dict[str, list[float]] = {}
    for each in numbers:
        for name, value in each:
            values.setdefault(name, []).append(value)
    return values


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of one or more numbers: it is finite if they are."""
    return sum(value / len(values) for value in values)


def means_by_name(numbers: Iterable[NamedNumbers]) -> dict[str, float]:
    """Return the mean of the values of each name, over those that have it."""
    return {name: mean_of(values) for name, values in by_name(numbers).items()}
