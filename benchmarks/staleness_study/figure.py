"""The study's figures: held-out accuracy over eta, a chart per method, and over the measured drift."""

from collections.abc import Mapping, Sequence
from math import log10

from benchmarks.staleness_study.methods import ETAS, REFERENCE
from benchmarks.staleness_study.report import Interval, Results, eta_name, final
from slipstream.backend.monitor.figure import FAINT, MARGIN, Chart, Colour, Figure, Sample

COLOURS: Sequence[Colour] = ((20, 140, 110), (38, 84, 160), (200, 90, 0))
"""Colours of the settings, in their order."""

COLUMNS = 3
PANEL, PANEL_HEIGHT = 760, 520
LEFT, RIGHT, TOP, BOTTOM = 110, 24, 70, 100
"""Margins of a panel, for its axes and their names."""
HEAD = 190

Place = tuple[int, Interval]
"""Position of an eta in ``ETAS``, and the accuracy that was measured there."""


def draw(settings: Mapping[str, Results], title: str) -> bytes:
    """Return a PNG of the results of each setting, by its name in the legend.

    Dotted lines repeat the reference method in every panel, for comparison.
    """
    methods = list(dict.fromkeys(method for results in settings.values() for method in results.methods()))
    figure = Figure(COLUMNS * PANEL, HEAD - (-len(methods) // COLUMNS) * PANEL_HEIGHT, title)
    entries: list[tuple[Sample, Colour, str]] = [
        ("line", colour, name) for colour, name in zip(COLOURS, settings, strict=False)
    ]
    figure.legend((MARGIN, 92), [*entries, ("dots", FAINT, f"{REFERENCE}, again")])
    note = "mean over seeds; shaded: its 95 % confidence interval"
    figure.text((MARGIN, 140), note, FAINT)
    lowest = min(
        interval.mean - (interval.half if interval.n > 1 else 0)
        for results in settings.values()
        for method in methods
        for _, interval in _places(results, method)
    )
    y_range = max(0.0, lowest // 10 * 10), 100.0
    for number, method in enumerate(methods):
        left, top = number % COLUMNS * PANEL, HEAD + number // COLUMNS * PANEL_HEIGHT
        edges = left + LEFT, top + TOP, left + PANEL - RIGHT, top + PANEL_HEIGHT - BOTTOM
        figure.text((left + LEFT, top + 18), method, size=32)
        _draw_panel(Chart(figure, *edges, (-0.3, len(ETAS) - 0.7), y_range), method, settings)
    return figure.png()


def _draw_panel(chart: Chart, method: str, settings: Mapping[str, Results]) -> None:
    chart.y_axis("held-out accuracy, %")
    etas = ("none" if eta < 0 else eta_name(eta) for eta in ETAS)
    chart.x_axis(dict(enumerate(etas)), "eta: bound on the lag, versions")
    present = [
        (colour, results)
        for colour, results in zip(COLOURS, settings.values(), strict=False)
        if method in results.methods()
    ]
    for colour, results in present:
        places = _places(results, method)
        if len(places) > 1 and all(interval.n > 1 for _, interval in places):
            chart.band([(x, y.mean - y.half, y.mean + y.half) for x, y in places], colour)
    for colour, results in present:
        if method != REFERENCE:
            chart.dotted([(x, y.mean) for x, y in _places(results, REFERENCE)], colour)
        chart.line([(x, y.mean) for x, y in _places(results, method)], colour)


def _places(results: Results, method: str) -> list[Place]:
    """Return the etas at which the method has been measured."""
    intervals = [(x, results.interval(final, method, eta)) for x, eta in enumerate(ETAS)]
    return [(x, interval) for x, interval in intervals if interval is not None]


DRIFTS = {
    0.0003: "3e-4",
    0.001: "1e-3",
    0.003: "3e-3",
    0.01: "0.01",
    0.03: "0.03",
    0.1: "0.1",
    0.3: "0.3",
    1.0: "1",
}
"""Marked values of KL(mu, pi_old)."""


def draw_over_kl(settings: Mapping[str, Results], title: str, named: Sequence[str]) -> bytes:
    """Return a PNG of accuracy over KL(mu, pi_old): every cell with a bound above 0, and unbounded ones.

    The first chart has the cells of the ``named`` methods, the second one those of the others.
    """
    width, height = 3 * PANEL // 2, HEAD + 2 * PANEL_HEIGHT // 2 + 200
    figure = Figure(2 * width, height, title)
    entries: list[tuple[Sample, Colour, str]] = [
        ("line", colour, name) for colour, name in zip(COLOURS, settings, strict=False)
    ]
    figure.legend((MARGIN, 92), entries)
    note = "each dot: a method at an eta above 0, mean over seeds; line: its 95 % confidence interval"
    figure.text((MARGIN, 140), note, FAINT)
    ticks = {log10(value): text for value, text in DRIFTS.items()}
    span = min(ticks) - 0.1, max(ticks) + 0.1
    names = " and ".join(named), "all other methods"
    for number, (name, wanted) in enumerate(zip(names, (True, False), strict=True)):
        left = number * width
        edges = left + LEFT, HEAD + TOP, left + width - RIGHT, height - BOTTOM
        figure.text((left + LEFT, HEAD + 18), name, size=32)
        chart = Chart(figure, *edges, span, (0.0, 100.0))
        chart.y_axis("held-out accuracy, %")
        chart.x_axis(ticks, "KL(mu, pi_old), nats per token, mean over the run")
        for colour, results in zip(COLOURS, settings.values(), strict=False):
            for method in results.methods():
                if (method in named) is wanted:
                    _draw_cells(chart, results, method, colour)
    return figure.png()


def _draw_cells(chart: Chart, results: Results, method: str, colour: Colour) -> None:
    for eta in ETAS:
        if eta == 0 or not results.has_cell(method, eta):
            continue
        runs = results.cell(method, eta).values()
        x = log10(sum(run["kl"] for run in runs) / len(runs))
        accuracy = Interval.of([final(run) for run in runs])
        if accuracy.n > 1:
            ends = [chart.place(x, accuracy.mean + sign * accuracy.half) for sign in (-1, 1)]
            chart.figure.pen.line(ends, colour, 2)
        chart.figure.dot(chart.place(x, accuracy.mean), 8, colour)
