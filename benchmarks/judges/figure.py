"""The figure: what users got right over their turns, and held-out problems before and after."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.judges.run import WAYS, Outcome, Way
from benchmarks.staleness_study.report import Interval
from slipstream.backend.monitor.figure import FAINT, MARGIN, Chart, Colour, Figure, Sample

COLOURS: Mapping[Way, Colour] = {"reward": (38, 84, 160), "hints": (200, 90, 0), "both": (20, 140, 110)}
NAMES: Mapping[Way, str] = {"reward": "votes alone", "hints": "hints alone", "both": "both"}

WIDTH, HEIGHT, SPLIT = 1500, 820, 1060
TOP, BOTTOM = 210, 690


def draw(outcomes: Sequence[Outcome], down: str) -> bytes:
    """Return a PNG. ``down``: what to say of the judge's outages."""
    figure = Figure(WIDTH, HEIGHT, "What users say, as votes, as hints, and as both", down)
    entries: list[tuple[Sample, Colour, str]] = [("line", COLOURS[way], NAMES[way]) for way in WAYS]
    figure.legend((MARGIN, 140), entries)
    turns = max(outcome.turns for outcome in outcomes)
    curves = Chart(figure, 130, TOP, SPLIT - 60, BOTTOM, (0, turns), (0, 100))
    curves.y_axis("right answers, %")
    curves.x_axis({x: f"{x:,}" for x in range(0, turns + 1, 256)}, "turns: answers to users that were judged")
    ends = Chart(figure, SPLIT + 60, TOP, WIDTH - 40, BOTTOM, (-0.5, len(WAYS) - 0.5), (0, 100))
    ends.y_axis("")
    ends.x_axis(dict(enumerate(WAYS)), "held-out problems, before and after")
    for place, way in enumerate(WAYS):
        of_way = [outcome for outcome in outcomes if outcome.way == way]
        for outcome in of_way:
            curves.dotted([(turns, 100 * share) for turns, share in outcome.curve], COLOURS[way])
        if of_way:
            curves.line(mean_curve([outcome.curve for outcome in of_way]), COLOURS[way])
            _ends(ends, place, of_way, COLOURS[way])
    note = "line: mean over seeds; dots: each seed; bars: 95 % confidence interval over seeds"
    figure.text((MARGIN, HEIGHT - 34), note, FAINT, size=22)
    return figure.png()


def _ends(chart: Chart, place: int, outcomes: Sequence[Outcome], colour: Colour) -> None:
    """Draw the held-out accuracies of a way: before to the left, after to the right."""
    points: list[tuple[float, float]] = []
    for x, values in (
        (place - 0.2, [100 * outcome.before for outcome in outcomes]),
        (place + 0.2, [100 * outcome.after for outcome in outcomes]),
    ):
        interval = Interval.of(values)
        if interval.n > 1:
            low, high = (chart.place(x, interval.mean + sign * interval.half) for sign in (-1, 1))
            chart.figure.pen.line([low, high], colour, 4)
        points.append((x, interval.mean))
    chart.line(points, colour)


def mean_curve(curves: Sequence[Sequence[tuple[int, float]]], points: int = 9) -> list[tuple[float, float]]:
    """Return the mean of curves at places that all of them cover, in percent, linear between their points."""
    import numpy as np

    low, high = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    places = [low + (high - low) * number / (points - 1) for number in range(points)]
    values = [np.interp(places, [x for x, _ in curve], [y for _, y in curve]) for curve in curves]
    return [
        (x, 100 * statistics.mean(column))
        for x, column in zip(places, zip(*values, strict=True), strict=True)
    ]
