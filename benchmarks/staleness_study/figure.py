"""The study's figures: held-out accuracy over eta, a chart per method, and over the measured drift."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MultipleLocator

from benchmarks.staleness_study.methods import ETAS, REFERENCE
from benchmarks.staleness_study.report import Interval, Results, eta_name, final
from slipstream.backend.monitor.figure import FAINT, HEAD_INCHES, house_style, png, sheet

COLOURS = ("#148c6e", "#2654a0", "#c85a00")
"""Colours of the settings, in their order."""

COLUMNS = 3
WIDTH, PANEL_HEIGHT = 11.4, 2.6
"""Inches of a picture, and of a chart on it."""

Place = tuple[int, Interval]
"""Position of an eta in ``ETAS``, and the accuracy that was measured there."""


@house_style
def draw(settings: Mapping[str, Results], title: str) -> bytes:
    """Return a PNG of the results of each setting, by its name in the legend.

    Dotted lines repeat the reference method in every panel, for comparison.
    """
    methods = list(dict.fromkeys(method for results in settings.values() for method in results.methods()))
    rows = -(-len(methods) // COLUMNS)
    legend = [*_legend(settings), Line2D([], [], color=FAINT, linestyle=":", label=f"{REFERENCE}, again")]
    note = "mean over seeds; shaded: its 95 % confidence interval"
    figure = sheet(WIDTH, HEAD_INCHES + PANEL_HEIGHT * rows, title, note, legend)
    lowest = min(
        interval.mean - (interval.half if interval.n > 1 else 0)
        for results in settings.values()
        for method in methods
        for _, interval in _places(results, method)
    )
    panels = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axes, method in zip(panels, methods, strict=False):
        axes.set_ylim(max(0.0, lowest // 10 * 10), 100)
        _draw_panel(axes, method, settings)
    for axes in panels[len(methods) :]:
        axes.set_axis_off()
    return png(figure)


def _legend(settings: Mapping[str, Results]) -> list[Line2D]:
    return [
        Line2D([], [], color=colour, marker="o", label=name)
        for colour, name in zip(COLOURS, settings, strict=False)
    ]


def _draw_panel(axes: Axes, method: str, settings: Mapping[str, Results]) -> None:
    _accuracy_axis(axes, method)
    axes.set(xlabel="eta: bound on the lag, versions", xlim=(-0.3, len(ETAS) - 0.7))
    axes.set_xticks(range(len(ETAS)), ["none" if eta < 0 else eta_name(eta) for eta in ETAS])
    for colour, results in zip(COLOURS, settings.values(), strict=False):
        places = _places(results, method)
        if method not in results.methods():
            continue
        etas = [eta for eta, _ in places]
        if len(places) > 1 and all(interval.n > 1 for _, interval in places):
            low, high = ([each.mean + sign * each.half for _, each in places] for sign in (-1, 1))
            axes.fill_between(etas, low, high, color=colour, alpha=0.18, linewidth=0)
        if method != REFERENCE:
            reference = [(eta, interval.mean) for eta, interval in _places(results, REFERENCE)]
            axes.plot(*zip(*reference, strict=True), ":", color=colour)
        axes.plot(etas, [interval.mean for _, interval in places], "o-", color=colour)


def _accuracy_axis(axes: Axes, title: str) -> None:
    axes.set(title=title, ylabel="held-out accuracy, %")
    axes.yaxis.set_major_locator(MultipleLocator(10))


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


@house_style
def draw_over_kl(settings: Mapping[str, Results], title: str, named: Sequence[str]) -> bytes:
    """Return a PNG of accuracy over KL(mu, pi_old): every cell with a bound above 0, and unbounded ones.

    The first chart has the cells of the ``named`` methods, the second one those of the others.
    """
    note = "each dot: a method at an eta above 0, mean over seeds; line: its 95 % confidence interval"
    figure = sheet(WIDTH, 4.6, title, note, _legend(settings))
    names = " and ".join(named), "all other methods"
    for axes, name, wanted in zip(figure.subplots(1, 2), names, (True, False), strict=True):
        _accuracy_axis(axes, name)
        axes.set(xlabel="KL(mu, pi_old), nats per token, mean over the run", xscale="log", ylim=(0, 100))
        axes.set_xlim(min(DRIFTS) / 1.5, max(DRIFTS) * 1.25)
        axes.set_xticks(list(DRIFTS), list(DRIFTS.values()))
        axes.minorticks_off()
        for colour, results in zip(COLOURS, settings.values(), strict=False):
            for method in results.methods():
                if (method in named) is wanted:
                    _draw_cells(axes, results, method, colour)
    return png(figure)


def _draw_cells(axes: Axes, results: Results, method: str, colour: str) -> None:
    for eta in ETAS:
        if eta == 0 or not results.has_cell(method, eta):
            continue
        runs = results.cell(method, eta).values()
        kl = sum(run["kl"] for run in runs) / len(runs)
        accuracy = Interval.of([final(run) for run in runs])
        half = accuracy.half if accuracy.n > 1 else 0
        axes.errorbar(kl, accuracy.mean, half, fmt="o", color=colour, elinewidth=0.8)
