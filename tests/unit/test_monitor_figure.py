"""Tables and pictures for reports: what is described is what is shown."""

import io

import numpy as np
import pytest
from matplotlib import rc_context, rcParams
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Patch
from rich.console import Console

from slipstream.backend.monitor.figure import DOTS_PER_INCH, HEAD_INCHES, clock_axis, house_style, png, sheet
from slipstream.backend.monitor.tables import pairs_table, rows_table


def printed(table) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]


def test_a_table_of_rows_shows_each_cell_under_its_name_and_a_gap_between_sections():
    columns = {"name": lambda row: row[0], "size": lambda row: row[1], "": lambda row: "[bold]"}
    rows = [("a", 5), ("b", 17), ("c", 17)]
    title, header, _, *lines = printed(rows_table("things", rows, columns))
    assert (title, header.split()) == ("things", ["name", "size"])
    assert [line.split() for line in lines] == [
        ["a", "5", "[bold]"],
        ["b", "17", "[bold]"],
        ["c", "17", "[bold]"],
    ]
    assert lines[0].index("5") == lines[1].index("7"), "numbers are aligned to the right"
    sectioned = rows_table("things", rows, columns, section=lambda row: row[1])
    assert [row.end_section for row in sectioned.rows] == [True, False, False]


def test_a_table_of_pairs_has_no_header():
    assert printed(pairs_table("things", {"a": "1", "b": "[2]"}))[1:] == ["a   1", "b   [2]"]


@pytest.mark.parametrize("end_s", [3.0, 42.0, 3600.0, 9_178.0, 86_400.0, 1e7])
@pytest.mark.parametrize("begin_s", [0.0, 12.3])
def test_a_clock_has_few_round_times(begin_s, end_s):
    axes = Figure().subplots()
    axes.set_xlim(begin_s, begin_s + end_s)
    clock_axis(axes)
    ticks = [time_s for time_s in axes.get_xticks() if begin_s <= time_s <= begin_s + end_s]
    assert 3 <= len(ticks) <= 13
    assert np.ptp(np.diff(ticks)) == 0 and all(time_s % 1 == 0 for time_s in ticks)
    assert axes.xaxis.get_major_formatter()(185.0) == "3:05"


@house_style
def drawn() -> bytes:
    figure = sheet(4, 3, "A title", "and more", [Patch(color="red", label="a thing")])
    figure.subplots().axhspan(0, 1, color="blue")
    return png(figure)


def test_charts_leave_the_head_of_a_sheet_to_its_title_and_legend():
    pixels = imread(io.BytesIO(drawn()), "png")[..., :3]
    assert pixels.shape == (3 * DOTS_PER_INCH, 4 * DOTS_PER_INCH, 3)
    head, charts = np.split(pixels, [round(HEAD_INCHES * DOTS_PER_INCH)])
    assert (head == (1, 0, 0)).all(axis=-1).any() and not (head == (0, 0, 1)).all(axis=-1).any()
    assert (charts == (0, 0, 1)).all(axis=-1).mean() > 0.4


def test_pictures_do_not_depend_on_settings_of_the_user():
    before = drawn()
    with rc_context({"savefig.dpi": 30, "font.size": 40}):
        assert drawn() == before
        assert rcParams["font.size"] == 40, "the style ends with the picture"
