"""The figure: what users got right over their turns, and held-out problems before and after."""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MultipleLocator

from benchmarks.judges.run import WAYS, Outcome, Way
from benchmarks.staleness_study.report import Interval
from slipstream.backend.monitor.figure import FAINT, house_style, png, sheet

COLOURS: Mapping[Way, str] = {"reward": "#2654a0", "hints": "#c85a00", "both": "#148c6e"}
NAMES: Mapping[Way, str] = {"reward": "votes alone", "hints": "hints alone", "both": "both"}


@house_style
def draw(outcomes: Sequence[Outcome], down: str) -> bytes:
    """Return a PNG. ``down``: what to say of the judge's outages."""
    legend = [Line2D([], [], color=COLOURS[way], marker="o", label=NAMES[way]) for way in WAYS]
    figure = sheet(9, 5, "What users say, as votes, as hints, and as both", down, legend)
    note = "line: mean over seeds; dots: each seed; bars: 95 % confidence interval over seeds"
    figure.supxlabel(note, x=0.02, ha="left", fontsize="small", color=FAINT)
    curves, ends = figure.subplots(1, 2, width_ratios=(2.4, 1))
    curves.set(xlim=(0, max(outcome.turns for outcome in outcomes)), ylim=(0, 100))
    curves.set(xlabel="turns: answers to users that were judged", ylabel="right answers, %")
    curves.xaxis.set_major_locator(MultipleLocator(256))
    curves.xaxis.set_major_formatter("{x:,.0f}")
    ends.set(xlim=(-0.5, len(WAYS) - 0.5), ylim=(0, 100), xlabel="held-out problems, before and after")
    ends.set_xticks(range(len(WAYS)), WAYS)
    for axes in (curves, ends):
        axes.yaxis.set_major_locator(MultipleLocator(10))
    for place, way in enumerate(WAYS):
        of_way = [outcome for outcome in outcomes if outcome.way == way]
        for outcome in of_way:
            turns, shares = np.array(outcome.curve).T
            curves.plot(turns, 100 * shares, ":", color=COLOURS[way])
        if of_way:
            points = mean_curve([outcome.curve for outcome in of_way])
            curves.plot(*zip(*points, strict=True), "o-", color=COLOURS[way])
            _ends(ends, place, of_way, COLOURS[way])
    return png(figure)


def _ends(axes: Axes, place: int, outcomes: Sequence[Outcome], colour: str) -> None:
    """Draw the held-out accuracies of a way: before to the left, after to the right."""
    before = Interval.of([100 * outcome.before for outcome in outcomes])
    after = Interval.of([100 * outcome.after for outcome in outcomes])
    halves = [interval.half if interval.n > 1 else 0 for interval in (before, after)]
    axes.errorbar([place - 0.2, place + 0.2], [before.mean, after.mean], halves, fmt="o-", color=colour)


def mean_curve(curves: Sequence[Sequence[tuple[int, float]]], points: int = 9) -> list[tuple[float, float]]:
    """Return the mean of curves at places that all of them cover, in percent, linear between their points."""
    low, high = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    places = [low + (high - low) * number / (points - 1) for number in range(points)]
    values = [np.interp(places, [x for x, _ in curve], [y for _, y in curve]) for curve in curves]
    return [
        (x, 100 * statistics.mean(column))
        for x, column in zip(places, zip(*values, strict=True), strict=True)
    ]
