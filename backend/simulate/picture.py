"""The timeline of a simulated run as a PNG: the whole run above, a few steps of it below."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from slipstream.backend.monitor.units import clock_face
from slipstream.backend.simulate.timeline import Timeline

Colour = tuple[int, int, int]

PAPER, INK, FAINT, GRID = (255, 255, 255), (33, 37, 41), (108, 117, 125), (222, 226, 230)
TRAINING, WAITING, PUBLISHING = (38, 84, 160), (233, 236, 239), (240, 140, 0)
IDLE, SOME, FULL = (241, 243, 245), (150, 222, 209), (9, 120, 105)
"""Engines: nothing runs, something runs, as many requests as may run at one time."""

WIDTH, LEFT, RIGHT = 2400, 250, 70
TRAINER_HEIGHT, GAP = 56, 10
ENGINES_HEIGHT, ROW_HEIGHT = 420, 56
"""Of all engine rows at most, and of one row at most."""

NAMED_VERSIONS = 16
"""More than these would be written over each other."""

ZOOMED_STEPS = 4
"""Steps that the lower part shows."""


@dataclass(frozen=True)
class Stretch:
    """One of the two time axes."""

    title: str
    begin_s: float
    end_s: float

    def x(self, time_s: float) -> float:
        share = (time_s - self.begin_s) / (self.end_s - self.begin_s)
        return LEFT + min(max(share, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    def shows(self, begin_s: float, end_s: float) -> bool:
        return end_s > self.begin_s and begin_s < self.end_s


def draw(timeline: Timeline, title: str, subtitle: str, max_running: int) -> bytes:
    """A PNG. ``max_running``: requests on one engine that are drawn as a full one."""
    rows = len(timeline.rows)
    row_height = min(ROW_HEIGHT, ENGINES_HEIGHT / rows)
    part_height = 90 + TRAINER_HEIGHT + GAP + rows * row_height + 80
    height = round(150 + 2 * part_height + 70)
    image = Image.new("RGB", (WIDTH, height), PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((40, 28), title, INK, _font(44))
    pen.text((40, 88), subtitle, FAINT, _font(28))
    top = 150.0
    for part in _parts(timeline):
        _draw_part(image, pen, timeline, part, top, row_height, max_running)
        top += part_height
    _draw_legend(pen, top + 6, max_running)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def _parts(timeline: Timeline) -> list[Stretch]:
    """The whole run, and some steps from its middle, from publication to publication."""
    ends = [end for _, end in timeline.pauses]
    first = max(len(ends) // 2 - ZOOMED_STEPS // 2, 0)
    last = min(first + ZOOMED_STEPS, len(ends) - 1)
    begin = ends[first] if last > first else 0.0
    return [
        Stretch(f"the whole run: {len(ends)} steps in {clock_face(timeline.end_s)}", 0.0, timeline.end_s),
        Stretch(f"from version {first + 1 if last > first else 0} to version {last + 1}", begin, ends[last]),
    ]


def _draw_part(
    image: Image.Image,
    pen: ImageDraw.ImageDraw,
    timeline: Timeline,
    part: Stretch,
    top: float,
    row_height: float,
    max_running: int,
) -> None:
    pen.text((LEFT, top + 6), part.title, INK, _font(30))
    top += 60
    bottom = top + 30 + TRAINER_HEIGHT
    _bars(pen, part, [(part.begin_s, part.end_s)], top + 30, bottom, WAITING)
    _bars(pen, part, timeline.training, top + 30, bottom, TRAINING)
    _bars(pen, part, timeline.pauses, top + 30, bottom, PUBLISHING)
    pen.text((LEFT - 20, (top + 30 + bottom) / 2), "trainer", INK, _font(28), anchor="rm")
    published = [
        (version, end)
        for version, (_, end) in enumerate(timeline.pauses, start=1)
        if part.begin_s <= end <= part.end_s
    ]
    for version, end in published:
        x = part.x(end)
        pen.line([(x, top + 16), (x, top + 28)], PUBLISHING, 3)
        if len(published) <= NAMED_VERSIONS:
            pen.text((x, top + 14), f"v{version}", FAINT, _font(22), anchor="mb")
    above = bottom + GAP
    rows = len(timeline.rows)
    cells = timeline.running(part.begin_s, part.end_s, WIDTH - LEFT - RIGHT) / max_running
    heat = Image.fromarray(_heat(cells))
    size = (WIDTH - LEFT - RIGHT, round(rows * row_height))
    image.paste(heat.resize(size, Image.Resampling.NEAREST), (LEFT, round(above)))
    below = above + size[1]
    for row in range(1, rows):
        y = above + row * row_height
        pen.line([(LEFT, y), (WIDTH - RIGHT, y)], PAPER, 2 if row_height > 20 else 1)
    _bars(pen, part, timeline.pauses, above, below, PUBLISHING)
    named = range(0, rows, max(1, round(26 / row_height + 0.5)))
    for row in named:
        y = above + (row + 0.5) * row_height
        pen.text((LEFT - 20, y), timeline.rows[row], INK, _font(24), anchor="rm")
    for time_s in _ticks(part.begin_s, part.end_s):
        x = part.x(time_s)
        pen.line([(x, below + 4), (x, below + 14)], FAINT, 2)
        pen.text((x, below + 18), clock_face(time_s), FAINT, _font(24), anchor="mt")


def _bars(
    pen: ImageDraw.ImageDraw,
    part: Stretch,
    spans: Sequence[tuple[float, float]],
    top: float,
    bottom: float,
    colour: Colour,
) -> None:
    """Each at least one pixel wide, so that a short pause is seen."""
    for begin, end in spans:
        if part.shows(begin, end):
            left, right = part.x(begin), part.x(end)
            pen.rectangle([left, top, max(right - 1, left), bottom - 1], colour)


def _heat(share: np.ndarray) -> np.ndarray:
    """uint8 [rows, columns, 3] colours of shares from 0 to 1."""
    some, full, idle = (np.array(colour, np.float64) for colour in (SOME, FULL, IDLE))
    blend = np.clip(share, 0, 1)[..., None]
    colours = some + (full - some) * blend
    # Short of one request in a hundred an engine counts as idle; from there to one in twenty it fades in.
    presence = np.clip(share[..., None] / 0.05, 0, 1)
    return np.rint(idle + (colours - idle) * presence).astype(np.uint8)


def _draw_legend(pen: ImageDraw.ImageDraw, top: float, max_running: int) -> None:
    x = float(LEFT)
    for colour, text in (
        (TRAINING, "training"),
        (WAITING, "trainer waits for a batch"),
        (PUBLISHING, "publishing: engines paused"),
        (IDLE, "engine idle"),
        (SOME, "few requests"),
        (FULL, f"{max_running} requests run"),
    ):
        pen.rectangle([x, top, x + 36, top + 28], colour, GRID)
        pen.text((x + 48, top + 14), text, INK, _font(26), anchor="lm")
        x += 48 + pen.textlength(text, _font(26)) + 50


def _ticks(begin_s: float, end_s: float) -> list[float]:
    """Round times, six to twelve of them."""
    for step in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400):
        if (end_s - begin_s) / step <= 12:
            break
    else:
        step = 86400 * (1 + int((end_s - begin_s) / 86400 / 12))
    first = -(-begin_s // step)
    return [step * number for number in range(int(first), int(end_s // step) + 1)]


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
