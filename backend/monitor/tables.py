"""Tables for the terminal in one style, described by what stands in each column."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from rich.box import SIMPLE_HEAD, Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = TypeVar("Row")
Columns = Mapping[str, Callable[[Row], object]]
"""Names of columns, in their order, and the function that gives what stands in a row there."""

WIDTH = 132
"""Columns of tables when the output is not a terminal."""


def table_console() -> Console:
    """Return a console on standard output that is wide enough for tables."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def rows_table(
    title: str,
    rows: Iterable[Row],
    columns: Columns[Row],
    *,
    left: Collection[str] = (),
    section: Callable[[Row], object] = lambda row: None,
) -> Table:
    """Return a table with a line for each of `rows`, and a gap wherever `section` changes its value.

    The first column, a column without a name and the columns in `left` hold text, which is aligned to the
    left; all others hold numbers.
    """
    table = _table(Text(title, style="bold"), SIMPLE_HEAD, show_header=True)
    for number, name in enumerate(columns):
        is_text = number == 0 or not name or name in left
        table.add_column(name, justify="left" if is_text else "right")
    previous = None
    for number, row in enumerate(rows):
        if number and section(row) != previous:
            table.add_section()
        previous = section(row)
        table.add_row(*(Text(str(cell(row))) for cell in columns.values()))
    return table


def pairs_table(title: str | Text, pairs: Mapping[str, str | Text], box: Box = SIMPLE_HEAD) -> Table:
    """Return a table of labels and values without a header."""
    table = _table(Text(title, style="bold") if isinstance(title, str) else title, box, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for label, value in pairs.items():
        table.add_row(label, Text(value) if isinstance(value, str) else value)
    return table


def _table(title: Text, box: Box, *, show_header: bool) -> Table:
    return Table(
        title=title,
        title_justify="left",
        min_width=title.cell_len + 2,
        box=box,
        show_header=show_header,
        border_style="" if show_header else "dim",
    )
