"""Pictures for reports, drawn with Pillow: a sheet, charts with two axes on it, and timelines of lanes.

Places on the sheet are in pixels from its top left corner; places in a chart are in the units of its axes.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, count, pairwise
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from slipstream.backend.monitor.units import clock_face

Colour = tuple[int, int, int]
Point = tuple[float, float]
Span = tuple[float, float]
"""Beginning and end on an axis."""
Sample = Literal["box", "line", "dots"]
"""Picture in a legend: a bar, a line with its points, or a dotted line."""

PAPER, INK, FAINT, GRID = (255, 255, 255), (33, 37, 41), (108, 117, 125), (222, 226, 230)

MARGIN = 40
TEXT_HEIGHT = 34
"""Pixels between two lines of text that do not touch."""
BAND_OPACITY = 0.18
CLOCK_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800)


class Figure:
    """A sheet with a title. `png` gives the finished picture."""

    def __init__(self, width: int, height: int, title: str, subtitle: str = "") -> None:
        self.image = Image.new("RGB", (width, height), PAPER)
        self.pen = ImageDraw.Draw(self.image)
        self.text((MARGIN, 26), title, size=42)
        self.text((MARGIN, 88), subtitle, FAINT, size=28)

    def text(
        self, place: Point, text: str, colour: Colour = INK, *, size: int = 26, anchor: str = "la"
    ) -> None:
        """Write one line of text. `anchor` is Pillow's: which point of the text lies on `place`."""
        self.pen.text(place, text, colour, _font(size), anchor=anchor)

    def upright(self, middle: Point, text: str) -> None:
        """Write text that reads from bottom to top around `middle`."""
        label = Image.new("RGB", (round(self.pen.textlength(text, _font(24))) + 4, 32), PAPER)
        ImageDraw.Draw(label).text((0, 0), text, INK, _font(24))
        label = label.rotate(90, expand=True)
        self.image.paste(label, (round(middle[0] - label.width / 2), round(middle[1] - label.height / 2)))

    def legend(self, place: Point, entries: Iterable[tuple[Sample, Colour, str]]) -> None:
        """Draw a row of samples, each with its meaning."""
        x, y = place
        for sample, colour, text in entries:
            if sample == "box":
                self.pen.rectangle([x, y + 2, x + 36, y + 30], colour, GRID)
                x -= 14
            elif sample == "line":
                self.pen.line([(x, y + 16), (x + 50, y + 16)], colour, 5)
                self.dot((x + 25, y + 16), 8, colour)
            else:
                for number in range(4):
                    self.dot((x + 4 + 14 * number, y + 16), 3, colour)
            self.text((x + 64, y + 16), text, anchor="lm")
            x += 64 + self.pen.textlength(text, _font(26)) + 50

    def dot(self, middle: Point, radius: float, colour: Colour) -> None:
        x, y = middle
        self.pen.ellipse([x - radius, y - radius, x + radius, y + radius], colour)

    def png(self) -> bytes:
        """Return the picture as a PNG file."""
        file = io.BytesIO()
        self.image.save(file, "PNG", optimize=True)
        return file.getvalue()


@dataclass(frozen=True)
class Chart:
    """A rectangle of a figure with two axes. Whatever lies outside of it is drawn on its edge."""

    figure: Figure
    left: float
    top: float
    right: float
    bottom: float
    x_range: Span
    y_range: Span = (0.0, 1.0)

    def place(self, x: float, y: float) -> Point:
        """Return where a point of the axes is on the sheet."""
        return (
            self.left + _share(x, self.x_range) * (self.right - self.left),
            self.bottom - _share(y, self.y_range) * (self.bottom - self.top),
        )

    def x_axis(self, ticks: Mapping[float, str], name: str = "") -> None:
        """Mark `ticks` below the chart, with the name of the axis below them."""
        for value, text in ticks.items():
            x, _ = self.place(value, 0)
            self.figure.pen.line([(x, self.bottom + 4), (x, self.bottom + 12)], FAINT, 2)
            self.figure.text((x, self.bottom + 14), text, FAINT, size=24, anchor="ma")
        middle = (self.left + self.right) / 2
        self.figure.text((middle, self.bottom + 52), name, size=24, anchor="ma")

    def y_axis(self, name: str) -> None:
        """Draw a grid line at round numbers, and the name of the axis to the left."""
        for value in _multiples(*self.y_range, _decimal_steps(), most=10):
            _, y = self.place(0, value)
            self.figure.pen.line([(self.left, y), (self.right, y)], GRID, 2)
            self.figure.text((self.left - 12, y), f"{value:g}", FAINT, size=24, anchor="rm")
        self.figure.upright((self.left - 80, (self.top + self.bottom) / 2), name)

    def line(self, points: Sequence[Point], colour: Colour) -> None:
        """Connect `points`, and draw a dot on each of them."""
        places = [self.place(*point) for point in points]
        self.figure.pen.line(places, colour, 5, joint="curve")
        for place in places:
            self.figure.dot(place, 8, colour)

    def dotted(self, points: Sequence[Point], colour: Colour) -> None:
        """Connect `points` with a dotted line."""
        for (x0, y0), (x1, y1) in pairwise(self.place(*point) for point in points):
            for share in np.arange(1, 12, 2) / 12:
                self.figure.dot((x0 + (x1 - x0) * share, y0 + (y1 - y0) * share), 3, colour)

    def band(self, edges: Sequence[tuple[float, float, float]], colour: Colour) -> None:
        """Shade the area between the lower and the upper edge, given as (x, lower, upper)."""
        upper = [self.place(x, high) for x, _, high in edges]
        lower = [self.place(x, low) for x, low, _ in edges]
        mask = Image.new("L", self.figure.image.size, 0)
        ImageDraw.Draw(mask).polygon([*upper, *reversed(lower)], fill=round(255 * BAND_OPACITY))
        self.figure.image.paste(colour, (0, 0), mask)

    def bars(self, spans: Iterable[Span], colour: Colour) -> None:
        """Fill the height of the chart over each span, at least one pixel wide: short pauses stay visible."""
        begin, end = self.x_range
        for first, last in spans:
            if last > begin and first < end:
                (left, _), (right, _) = self.place(first, 0), self.place(last, 0)
                box = [left, self.top, max(right - 1, left), self.bottom - 1]
                self.figure.pen.rectangle(box, colour)

    def shade(self, levels: np.ndarray, scale: Mapping[float, Colour]) -> None:
        """Fill the chart from left to right with the colours of `levels`: see `shades`."""
        strip = Image.fromarray(shades(levels, scale)[None])
        corner = round(self.left), round(self.top)
        size = round(self.right) - corner[0], round(self.bottom) - corner[1]
        self.figure.image.paste(strip.resize(size, Image.Resampling.NEAREST), corner)


@dataclass(frozen=True)
class Lane:
    """One row of a timeline: levels as a background, and spans on it."""

    name: str
    height: float
    spans: Mapping[Colour, Sequence[Span]] = field(default_factory=dict)
    """Spans of each colour in seconds; later colours cover earlier ones."""
    levels: np.ndarray | None = None
    """Values over the width of the timeline, coloured by its scale."""


def draw_timeline(
    frame: Chart, lanes: Sequence[Lane], scale: Mapping[float, Colour], marks: Mapping[float, str]
) -> None:
    """Draw lanes from the top of `frame` to its bottom, a clock below them, and `marks` above.

    The x axis of the frame is in seconds; the lanes' heights must add up to the height of the frame.
    """
    top, named_until = frame.top, -float("inf")
    for lane in lanes:
        gap = 2 if lane.height > 20 else 1
        chart = Chart(frame.figure, frame.left, top, frame.right, top + lane.height - gap, frame.x_range)
        if lane.levels is not None:
            chart.shade(lane.levels, scale)
        for colour, spans in lane.spans.items():
            chart.bars(spans, colour)
        middle = top + lane.height / 2
        if lane.name and middle >= named_until:
            frame.figure.text((frame.left - 20, middle), lane.name, anchor="rm")
            named_until = middle + TEXT_HEIGHT
        top += lane.height
    for time_s, text in marks.items():
        x, _ = frame.place(time_s, 0)
        frame.figure.pen.line([(x, frame.top - 14), (x, frame.top - 4)], FAINT, 3)
        frame.figure.text((x, frame.top - 16), text, FAINT, size=22, anchor="mb")
    frame.x_axis(clock_ticks(*frame.x_range))


def shades(levels: np.ndarray, scale: Mapping[float, Colour]) -> np.ndarray:
    """Return uint8 [..., 3] colours of `levels`, blended between the levels that `scale` gives colours to."""
    channels = np.array(list(scale.values())).T
    blended = [np.interp(levels, list(scale), channel) for channel in channels]
    return np.rint(np.stack(blended, axis=-1)).astype(np.uint8)


def clock_ticks(begin_s: float, end_s: float) -> dict[float, str]:
    """Return at most thirteen round times, with what a clock shows then."""
    steps = chain(CLOCK_STEPS, (86400 * days for days in count(1)))
    return {time_s: clock_face(time_s) for time_s in _multiples(begin_s, end_s, steps, most=12)}


def _multiples(low: float, high: float, steps: Iterable[float], most: int) -> list[float]:
    """Return the multiples of a step from `low` to `high`: the first step of which at most `most` fit."""
    step = next(step for step in steps if (high - low) / step <= most)
    return [step * number for number in range(int(-(-low // step)), int(high // step) + 1)]


def _decimal_steps() -> Iterator[float]:
    for exponent in count(-6):
        yield from (digit * 10.0**exponent for digit in (1, 2, 5))


def _share(value: float, span: Span) -> float:
    return min(max((value - span[0]) / (span[1] - span[0]), 0.0), 1.0)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
