"""The timeline of a simulated run as a PNG: the whole run above, a few steps of it below."""

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Patch

from slipstream.backend.monitor.figure import HEAD_INCHES, clock_axis, house_style, png, sheet
from slipstream.backend.monitor.units import clock_face
from slipstream.backend.simulate.compare import Timeline

TRAINING, WAITING, PUBLISHING = "#2654a0", "#e9ecef", "#f08c00"
IDLE, SOME, FULL = "#f1f3f5", "#96ded1", "#097869"
ENGINE_SCALE = LinearSegmentedColormap.from_list("engine", [(0.0, IDLE), (0.05, SOME), (1.0, FULL)], N=1024)
"""Colours by the share of an engine's places that are taken: from 5 % on it visibly works."""

WIDTH = 12.0
ENGINE_HEIGHT, ENGINES_HEIGHT = 0.28, 2.1
"""Largest height of one engine lane, and of all of them together, in inches."""
TRAINER_HEIGHT = 0.3
AXES_HEIGHT = 0.85
"""Inches of a part for its heading, the versions and the clock."""
NAME_HEIGHT = 0.17
"""Inches that the name of a lane needs."""

COLUMNS = 2048
NAMED_VERSIONS = 16
"""Largest number of versions whose names fit above the trainer."""

ZOOMED_STEPS = 4
"""Number of steps that the lower part shows."""

Span = tuple[float, float]
"""Beginning and end in seconds."""


@house_style
def draw(timeline: Timeline, title: str, subtitle: str, max_running: int) -> bytes:
    """Return a PNG. An engine that runs ``max_running`` requests is drawn as full."""
    lane_height = min(ENGINE_HEIGHT, ENGINES_HEIGHT / len(timeline.rows))
    lanes_height = TRAINER_HEIGHT + lane_height * len(timeline.rows)
    height = HEAD_INCHES + 2 * (lanes_height + AXES_HEIGHT)
    figure = sheet(
        WIDTH,
        height,
        title,
        subtitle,
        [
            Patch(color=TRAINING, label="training"),
            Patch(color=WAITING, label="trainer waits for a batch"),
            Patch(color=PUBLISHING, label="publishing: engines paused"),
            Patch(color=IDLE, label="engine idle"),
            Patch(color=SOME, label="few requests"),
            Patch(color=FULL, label=f"{max_running} requests run"),
        ],
    )
    parts = figure.subplots(2, 1)
    for axes, (heading, span) in zip(parts, _parts(timeline).items(), strict=True):
        _draw_part(axes, timeline, span, lane_height, max_running)
        axes.set_title(heading, pad=22)
    return png(figure)


def _draw_part(axes: Axes, timeline: Timeline, span: Span, lane_height: float, max_running: int) -> None:
    """Draw the trainer and the engines over a time. The y axis is in inches, from the bottom."""
    (begin_s, end_s), rows = span, timeline.rows
    top = lane_height * len(rows)
    running = timeline.running(begin_s, end_s, COLUMNS) / max_running
    shape = {"aspect": "auto", "interpolation": "nearest", "extent": (begin_s, end_s, 0, top)}
    axes.imshow(running, ENGINE_SCALE, vmin=0, vmax=1, **shape)
    trainer = (top + 0.06, TRAINER_HEIGHT - 0.06)
    # An edge of one pixel shows spans that are narrower, too.
    for spans, lane, colour in (
        ([(0.0, timeline.end_s)], trainer, WAITING),
        (timeline.pauses, trainer, PUBLISHING),
        (timeline.training, trainer, TRAINING),
        (timeline.pauses, (0.0, top), PUBLISHING),
    ):
        bars = [(begin, end - begin) for begin, end in spans if end > begin_s and begin < end_s]
        axes.broken_barh(bars, lane, color=colour, linewidth=0.36, antialiased=False)
    axes.hlines([lane_height * row for row in range(1, len(rows))], begin_s, end_s, "white", linewidth=0.5)
    every = int(-(-NAME_HEIGHT // lane_height))
    names = {top - lane_height * (row + 0.5): name for row, name in enumerate(rows) if row % every == 0}
    axes.set_yticks([sum(trainer) - trainer[1] / 2, *names], ["trainer", *names.values()])
    axes.set(xlim=span, ylim=(0, sum(trainer)))
    axes.grid(visible=False)
    clock_axis(axes)
    resumed = {
        end: f"v{number}" for number, (_, end) in enumerate(timeline.pauses, 1) if begin_s <= end <= end_s
    }
    versions = axes.secondary_xaxis("top")
    versions.spines[:].set_visible(False)
    versions.set_xticks(
        list(resumed), list(resumed.values()) if len(resumed) <= NAMED_VERSIONS else [""] * len(resumed)
    )


def _parts(timeline: Timeline) -> dict[str, Span]:
    """Return the whole run, and some steps from its middle, from publication to publication."""
    ends = [end_s for _, end_s in timeline.pauses]
    first = max(len(ends) // 2 - ZOOMED_STEPS // 2, 0)
    last = min(first + ZOOMED_STEPS, len(ends) - 1)
    begin_s, begin_version = (ends[first], first + 1) if last > first else (0.0, 0)
    return {
        f"the whole run: {len(ends)} steps in {clock_face(timeline.end_s)}": (0.0, timeline.end_s),
        f"from version {begin_version} to version {last + 1}": (begin_s, ends[last]),
    }
