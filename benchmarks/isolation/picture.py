"""The timeline of watched runs as a PNG: how fast each loop went, with the disturbances shaded."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchmarks.isolation.course import LoopRun
from benchmarks.isolation.rates import RATES, Events
from slipstream.backend.monitor.figure import FAINT, HEAD_INCHES, clock_axis, house_style, png, sheet

COLOURS = {
    "answers": "#2654a0",
    "entries": "#097869",
    "verdicts": "#f08c00",
    "groups": "#868e96",
    "steps": "#c12552",
}
SHADE = {"slowed": "#ffd43b", "stopped": "#ff922b", "killed": "#fa5252"}
MEANS = {
    "answers": "answers",
    "entries": "entries in the ledger",
    "verdicts": "verdicts",
    "groups": "groups from prompts",
    "steps": "training steps",
}

WIDTH, PANEL_HEIGHT = 12.0, 2.3
"""Inches of the picture, and of each run on it."""

BIN_S = 8.0
HIGHEST = 1.6
"""Upper end of the axis of rates."""


@house_style
def draw(runs: Sequence[LoopRun]) -> bytes:
    """Return a PNG with a panel for each run."""
    figure = sheet(
        WIDTH,
        HEAD_INCHES + PANEL_HEIGHT * len(runs),
        "Isolation: one loop is disturbed, the others go on",
        f"Rates over {BIN_S:.0f} s, as shares of the undisturbed ones",
        [Line2D([], [], color=COLOURS[name], label=MEANS[name]) for name in RATES],
    )
    panels = figure.subplots(len(runs), 1, squeeze=False)
    for axes, run in zip(panels.flat, runs, strict=True):
        _draw_run(axes, run)
    return png(figure)


def _draw_run(axes: Axes, run: LoopRun) -> None:
    begin = min(cell.calm[0] for cell in run.cells)
    end = max(cell.harmed[1] for cell in run.cells)
    what = "one of two engines" if run.loop == "engine" else f"the {run.loop}"
    axes.set(title=f"{what} is disturbed", ylabel="share", xlim=(begin, end), ylim=(0, HIGHEST))
    for cell in run.cells:
        low, high = cell.harmed
        axes.axvspan(low, high, color=SHADE[cell.kind], alpha=0.18, linewidth=0)
        axes.text((low + high) / 2, HIGHEST * 0.97, cell.kind, color=FAINT, ha="center", va="top")
    for name in RATES:
        calm = [cell.rates[name][0] for cell in run.cells]
        mean = sum(calm) / len(calm)
        if mean:
            axes.plot(*_points(run.events, name, mean, begin, end), color=COLOURS[name], linewidth=1.5)
    clock_axis(axes)


def _points(
    events: Events, name: str, undisturbed: float, begin: float, end: float
) -> tuple[list[float], list[float]]:
    """Return times and shares."""
    times: list[float] = []
    shares: list[float] = []
    at = begin
    while at + BIN_S <= end:
        times.append(at + BIN_S / 2)
        shares.append(min(HIGHEST, events.rate(name, at, at + BIN_S) / undisturbed))
        at += BIN_S / 4
    return times, shares
