"""Ranges of a flattened matrix as rectangles of the matrix."""

from collections.abc import Iterator
from typing import NamedTuple


class Rectangle(NamedTuple):
    """Rows ``row`` to ``row + rows`` and columns ``column`` to ``column + columns`` of a matrix."""

    row: int
    column: int
    rows: int
    columns: int


def rectangles(start: int, end: int, columns: int) -> Iterator[Rectangle]:
    """Split elements ``start`` to ``end`` of a row-major matrix of ``columns`` columns into rectangles.

    There are at most three, in the order of the elements: the rest of a row, whole rows, the start of a row.

    >>> [tuple(r) for r in rectangles(2, 11, columns=4)]
    [(0, 2, 1, 2), (1, 0, 1, 4), (2, 0, 1, 3)]
    """
    while start < end:
        row, column = divmod(start, columns)
        rows = (end - start) // columns if column == 0 else 0
        if rows:
            piece = Rectangle(row, 0, rows, columns)
        else:
            piece = Rectangle(row, column, 1, min(columns - column, end - start))
        yield piece
        start += piece.rows * piece.columns
