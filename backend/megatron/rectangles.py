"""Ranges of a flattened matrix as rectangles of the matrix."""

from collections.abc import Iterator
from typing import NamedTuple


class Rectangle(NamedTuple):
    row: int
    column: int
    rows: int
    columns: int


def rectangles(start: int, end: int, columns: int) -> Iterator[Rectangle]:
    """Split elements ``start`` to ``end`` of a row-major matrix of ``columns`` columns into whole rectangles.

    At most three, in the order of the elements: the rest of a row, whole rows, the beginning of a row.

    >>> [tuple(r) for r in rectangles(2, 11, columns=4)]
    [(0, 2, 1, 2), (1, 0, 1, 4), (2, 0, 1, 3)]
    """
    while start < end:
        row, column = divmod(start, columns)
        rows = (end - start) // columns if column == 0 else 0
        found = (
            Rectangle(row, 0, rows, columns)
            if rows
            else Rectangle(row, column, 1, min(columns - column, end - start))
        )
        yield found
        start += found.rows * found.columns
