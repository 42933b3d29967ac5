"""Tables and pictures for reports: what is described is what is shown."""

import io

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from slipstream.backend.monitor.figure import PAPER, Chart, Figure, Lane, clock_ticks, draw_timeline, shades
from slipstream.backend.monitor.tables import pairs_table, rows_table

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def printed(table) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]


def pixels(figure: Figure) -> np.ndarray:
    with Image.open(io.BytesIO(figure.png())) as image:
        return np.array(image)


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
    ticks = list(clock_ticks(begin_s, begin_s + end_s))
    assert 3 <= len(ticks) <= 13
    assert begin_s <= ticks[0] and ticks[-1] <= begin_s + end_s
    assert len(set(np.diff(ticks))) == 1


def test_shades_blend_between_the_colours_of_a_scale():
    found = shades(np.array([0.0, 0.5, 1.0, 2.0]), {0.0: WHITE, 1.0: RED})
    assert found.tolist() == [[255, 255, 255], [255, 128, 128], [255, 0, 0], [255, 0, 0]]


def test_a_chart_draws_in_the_units_of_its_axes_and_nothing_outside():
    figure = Figure(400, 300, "")
    chart = Chart(figure, 100, 100, 300, 200, x_range=(10.0, 20.0), y_range=(-1.0, 1.0))
    assert chart.place(15, 0) == (200, 150)
    assert chart.place(0, 5) == (100, 100)
    chart.bars([(0.0, 12.0), (15.0, 15.0), (30.0, 40.0)], RED)
    drawn = (pixels(figure) == RED).all(axis=-1)
    assert drawn[:, 100:140].sum() == 40 * 100
    assert drawn[:, 200].sum() == 100, "even a pause without a length is seen"
    assert drawn.sum() == 41 * 100


def test_a_timeline_stacks_its_lanes_and_later_colours_cover_earlier_ones():
    figure = Figure(400, 400, "")
    frame = Chart(figure, 100, 100, 300, 200, x_range=(0.0, 10.0))
    spans = {BLUE: [(0.0, 10.0)], RED: [(5.0, 10.0)]}
    lanes = [Lane("above", 50, spans), Lane("below", 50, levels=np.array([0.0, 1.0]))]
    draw_timeline(frame, lanes, {0.0: RED, 1.0: BLUE}, {5.0: "v1"})
    image = pixels(figure)
    assert [tuple(image[120, x]) for x in (150, 250)] == [BLUE, RED]
    assert [tuple(image[170, x]) for x in (150, 250)] == [RED, BLUE]
    assert tuple(image[149, 150]) == PAPER, "lanes are told apart by a gap"
