"""The timeline of watched runs as a PNG: how fast each loop went, with the disturbances shaded."""

from collections.abc import Sequence

from benchmarks.isolation.course import LoopRun
from benchmarks.isolation.rates import RATES, Events
from slipstream.backend.monitor.figure import FAINT, Chart, Colour, Figure, Point, clock_ticks

COLOURS: dict[str, Colour] = {
    "answers": (38, 84, 160),
    "entries": (9, 120, 105),
    "verdicts": (240, 140, 0),
    "groups": (134, 142, 150),
    "steps": (193, 37, 82),
}
SHADE = {"slowed": (255, 212, 59), "stopped": (255, 146, 43), "killed": (250, 82, 82)}
MEANS = {
    "answers": "answers",
    "entries": "entries in the ledger",
    "verdicts": "verdicts",
    "groups": "groups from prompts",
    "steps": "training steps",
}

WIDTH, LEFT, RIGHT = 2400, 150, 60
HEAD, PANEL, ABOVE, BELOW, FOOT = 190, 330, 60, 70, 20
BIN_S = 8.0
HIGHEST = 1.6
"""Upper end of the axis of rates."""


def draw(runs: Sequence[LoopRun]) -> bytes:
    """Return a PNG with a panel for each run."""
    height = HEAD + len(runs) * (ABOVE + PANEL + BELOW) + FOOT
    figure = Figure(
        WIDTH,
        height,
        "Isolation: one loop is disturbed, the others go on",
        f"Rates over {BIN_S:.0f} s, as shares of the undisturbed ones",
    )
    figure.legend((LEFT, 136), [("line", COLOURS[name], MEANS[name]) for name in RATES])
    for number, run in enumerate(runs):
        top = HEAD + number * (ABOVE + PANEL + BELOW) + ABOVE
        _draw_run(figure, run, top)
    return figure.png()


def _draw_run(figure: Figure, run: LoopRun, top: float) -> None:
    begin = min(cell.calm[0] for cell in run.cells)
    end = max(cell.harmed[1] for cell in run.cells)
    chart = Chart(figure, LEFT, top, WIDTH - RIGHT, top + PANEL, (begin, end), (0.0, HIGHEST))
    what = "one of two engines" if run.loop == "engine" else f"the {run.loop}"
    figure.text((LEFT, top - 44), f"{what} is disturbed", size=30)
    chart.y_axis("share")
    for cell in run.cells:
        low, high = cell.harmed
        chart.band([(low, 0.0, HIGHEST), (high, 0.0, HIGHEST)], SHADE[cell.kind])
        x, y = chart.place((low + high) / 2, HIGHEST)
        figure.text((x, y + 6), cell.kind, FAINT, anchor="ma")
    for name in RATES:
        calm = [cell.rates[name][0] for cell in run.cells]
        mean = sum(calm) / len(calm)
        if mean:
            points = _points(run.events, name, mean, begin, end)
            figure.pen.line([chart.place(*point) for point in points], COLOURS[name], 4, joint="curve")
    chart.x_axis(clock_ticks(begin, end))


def _points(events: Events, name: str, undisturbed: float, begin: float, end: float) -> list[Point]:
    points: list[Point] = []
    at = begin
    while at + BIN_S <= end:
        points.append((at + BIN_S / 2, min(HIGHEST, events.rate(name, at, at + BIN_S) / undisturbed)))
        at += BIN_S / 4
    return points
