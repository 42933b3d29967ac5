"""The style of the pictures that matplotlib draws for reports: a sheet with its head, a clock as an axis.

Matplotlib takes a second to load, so modules that draw are imported in the function that wants a picture.
"""

import io
from collections.abc import Sequence
from itertools import chain, count

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from slipstream.backend.monitor.units import clock_face

INK, FAINT, GRID = "#212529", "#6c757d", "#dee2e6"

DOTS_PER_INCH = 200
HEAD_INCHES = 0.95
"""Height of the title, the subtitle and the legend above the charts."""

CLOCK_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800)
MOST_STEPS = 12
"""Largest number of steps of a clock, whose times need a twelfth of the picture's width each."""

house_style = style.context(
    {
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": GRID,
        **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "ytick.major.size": 0,
        "lines.linewidth": 1.8,
        "lines.markersize": 6,
        "legend.frameon": False,
        "savefig.dpi": DOTS_PER_INCH,
    },
    after_reset=True,
)
"""Decorator of a function that draws: its picture has this style, whatever the user's matplotlibrc says."""


def sheet(width: float, height: float, title: str, subtitle: str, legend: Sequence[Artist]) -> Figure:
    """Return a figure with its head; the charts that are added to it share the rest.

    The size is in inches. The legend is one row of artists with labels.
    """
    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - HEAD_INCHES / height), w_pad=0.1, h_pad=0.1)
    left = 0.2 / width
    figure.text(left, 1 - 0.15 / height, title, fontsize=15, verticalalignment="top")
    figure.text(left, 1 - 0.45 / height, subtitle, color=FAINT, verticalalignment="top")
    row = {
        "loc": "upper left",
        "ncols": len(legend),
        "borderaxespad": 0,
        "borderpad": 0,
        "columnspacing": 2.5,
    }
    figure.legend(handles=legend, bbox_to_anchor=(left, 1 - 0.68 / height), **row)
    return figure


def clock_axis(axes: Axes) -> None:
    """Mark round times on the x axis, which is in seconds, as a clock shows them."""
    begin_s, end_s = axes.get_xlim()
    steps = chain(CLOCK_STEPS, (86400 * days for days in count(1)))
    step = next(step for step in steps if end_s - begin_s <= MOST_STEPS * step)
    axes.xaxis.set_major_locator(MultipleLocator(step))
    axes.xaxis.set_major_formatter(lambda time_s, _: clock_face(time_s))


def png(figure: Figure) -> bytes:
    """Return the picture as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", pil_kwargs={"optimize": True})
    return file.getvalue()
