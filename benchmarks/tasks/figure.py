"""The figure: a small chart for each task."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, MultipleLocator

from benchmarks.judges.figure import mean_curve
from benchmarks.tasks.run import Outcome
from slipstream.backend.monitor.figure import FAINT, house_style, png, sheet

COLOUR = "#2654a0"
COLUMNS = 3


@house_style
def draw(outcomes: Sequence[Outcome]) -> bytes:
    """Return a PNG: a dotted line for each seed, and one for their mean."""
    tasks = list(dict.fromkeys(each.task for each in outcomes))
    columns = min(COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    legend = [
        Line2D([], [], color=COLOUR, marker="o", markersize=4, label="mean over seeds"),
        Line2D([], [], color=FAINT, linestyle=":", label="each seed"),
    ]
    about = "reward of held-out prompts in percent, by training step"
    figure = sheet(9, 1 + 2.2 * rows, "Small tasks on two cores", about, legend)
    charts = figure.subplots(rows, columns, squeeze=False).flat
    for place, axes in enumerate(charts):
        if place < len(tasks):
            _chart(axes, tasks[place], [each.curve for each in outcomes if each.task == tasks[place]])
        else:
            axes.set_visible(False)
    return png(figure)


def _chart(axes: Axes, task: str, curves: Sequence[Sequence[tuple[int, float]]]) -> None:
    axes.set(title=task, ylim=(0, 103))
    axes.yaxis.set_major_locator(MultipleLocator(25))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    for curve in curves:
        axes.plot([step for step, _ in curve], [100 * reward for _, reward in curve], ":", color=FAINT)
    mean = mean_curve(curves, points=len(curves[0]))
    axes.plot(*zip(*mean, strict=True), "o-", color=COLOUR, markersize=4)
