"""The figure: one panel per method, held-out accuracy over eta, with confidence bands."""

import io
import itertools
from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont

from benchmarks.staleness_study.methods import ETAS, REFERENCE
from benchmarks.staleness_study.report import Interval, Results, eta_name, final

Colour = tuple[int, int, int]

PAPER, INK, FAINT, GRID = (255, 255, 255), (33, 37, 41), (108, 117, 125), (222, 226, 230)
LINES: Sequence[Colour] = ((20, 140, 110), (38, 84, 160), (200, 90, 0))
"""Of the settings, in their order."""
BAND = 0.18
"""How much of a line's colour its band has."""

COLUMNS = 3
PANEL, PANEL_HEIGHT = 760, 520
LEFT, RIGHT, TOP, BOTTOM = 110, 24, 70, 100
"""Margins of a panel, for its axes and their names."""
HEAD = 190


def draw(settings: Mapping[str, Results], title: str) -> bytes:
    """A PNG. ``settings``: what each is called in the legend, and its runs. The dotted lines repeat, for
    comparison, the reference method in every panel."""
    methods = list(dict.fromkeys(method for results in settings.values() for method in results.methods()))
    rows = -(-len(methods) // COLUMNS)
    image = Image.new("RGB", (COLUMNS * PANEL, HEAD + rows * PANEL_HEIGHT), PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((40, 26), title, INK, _font(40))
    _legend(pen, list(settings), top=96)
    lowest, highest = _range(settings, methods)
    for number, method in enumerate(methods):
        corner = (number % COLUMNS * PANEL, HEAD + number // COLUMNS * PANEL_HEIGHT)
        _Panel(image, corner, lowest, highest).draw(method, settings)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


class _Panel:
    def __init__(self, image: Image.Image, corner: tuple[int, int], lowest: float, highest: float) -> None:
        self._image, self._corner, self._lowest, self._highest = image, corner, lowest, highest
        self._pen = ImageDraw.Draw(image)

    def draw(self, method: str, settings: Mapping[str, Results]) -> None:
        self._axes(method)
        present = [
            (colour, results)
            for colour, results in zip(LINES, settings.values(), strict=False)
            if method in results.methods()
        ]
        for colour, results in present:
            self._band([results.interval(final, method, eta) for eta in ETAS], colour)
        for colour, results in present:
            if method != REFERENCE:
                self._dotted([results.interval(final, REFERENCE, eta) for eta in ETAS], colour)
            self._line([results.interval(final, method, eta) for eta in ETAS], colour)

    def _x(self, place: int) -> float:
        width = PANEL - LEFT - RIGHT - 60
        return self._corner[0] + LEFT + 30 + place / (len(ETAS) - 1) * width

    def _y(self, value: float) -> float:
        share = (value - self._lowest) / (self._highest - self._lowest)
        return self._corner[1] + PANEL_HEIGHT - BOTTOM - share * (PANEL_HEIGHT - TOP - BOTTOM)

    def _axes(self, method: str) -> None:
        left, right = self._corner[0] + LEFT, self._corner[0] + PANEL - RIGHT
        self._pen.text((left, self._corner[1] + 18), method, INK, _font(32))
        step = 10 if self._highest - self._lowest > 30 else 5
        for value in range(int(self._lowest), int(self._highest) + 1, step):
            y = self._y(value)
            self._pen.line([(left, y), (right, y)], GRID, 2)
            self._pen.text((left - 12, y), f"{value}", FAINT, _font(24), anchor="rm")
        bottom = self._corner[1] + PANEL_HEIGHT - BOTTOM
        for place, eta in enumerate(ETAS):
            name = "none" if eta < 0 else eta_name(eta)
            self._pen.text((self._x(place), bottom + 12), name, FAINT, _font(24), anchor="mt")
        self._pen.text(
            ((left + right) / 2, bottom + 48), "eta: bound on the lag, versions", INK, _font(24), anchor="mt"
        )
        self._upright("held-out accuracy, %")

    def _upright(self, text: str) -> None:
        font = _font(24)
        label = Image.new("RGB", (round(self._pen.textlength(text, font)) + 4, 32), PAPER)
        ImageDraw.Draw(label).text((0, 0), text, INK, font)
        label = label.rotate(90, expand=True)
        middle = self._corner[1] + TOP + (PANEL_HEIGHT - TOP - BOTTOM) / 2
        self._image.paste(label, (self._corner[0] + 18, round(middle - label.height / 2)))

    def _band(self, intervals: Sequence[Interval | None], colour: Colour) -> None:
        known = [(self._x(place), one) for place, one in enumerate(intervals) if one is not None]
        if len(known) < 2 or any(one.n < 2 for _, one in known):
            return
        above = [(x, self._y(min(one.mean + one.half, self._highest))) for x, one in known]
        below = [(x, self._y(max(one.mean - one.half, self._lowest))) for x, one in known]
        mask = Image.new("L", self._image.size, 0)
        ImageDraw.Draw(mask).polygon([*above, *reversed(below)], fill=round(255 * BAND))
        self._image.paste(Image.new("RGB", self._image.size, colour), mask=mask)

    def _line(self, intervals: Sequence[Interval | None], colour: Colour) -> None:
        points = self._points(intervals)
        self._pen.line(points, colour, 5, joint="curve")
        for x, y in points:
            self._pen.ellipse([x - 8, y - 8, x + 8, y + 8], colour)

    def _dotted(self, intervals: Sequence[Interval | None], colour: Colour) -> None:
        points = self._points(intervals)
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            for at in range(1, 12, 2):
                x, y = x0 + (x1 - x0) * at / 12, y0 + (y1 - y0) * at / 12
                self._pen.ellipse([x - 3, y - 3, x + 3, y + 3], colour)

    def _points(self, intervals: Sequence[Interval | None]) -> list[tuple[float, float]]:
        return [
            (self._x(place), self._y(max(one.mean, self._lowest)))
            for place, one in enumerate(intervals)
            if one is not None
        ]


def _legend(pen: ImageDraw.ImageDraw, names: Sequence[str], top: float) -> None:
    x = 40.0
    for colour, name in zip(LINES, names, strict=False):
        pen.line([(x, top + 16), (x + 50, top + 16)], colour, 5)
        pen.ellipse([x + 17, top + 8, x + 33, top + 24], colour)
        pen.text((x + 64, top + 16), name, INK, _font(28), anchor="lm")
        x += 64 + pen.textlength(name, _font(28)) + 50
    for at in range(4):
        pen.ellipse([x + at * 14, top + 13, x + at * 14 + 6, top + 19], FAINT)
    pen.text((x + 68, top + 16), f"{REFERENCE}, again", INK, _font(28), anchor="lm")
    text = "mean over seeds; shaded: its 95 % confidence interval"
    pen.text((40, top + 44), text, FAINT, _font(26))


def _range(settings: Mapping[str, Results], methods: Sequence[str]) -> tuple[float, float]:
    """Of all that is drawn, to whole tens."""
    lows = [
        found.mean - (found.half if found.n > 1 else 0)
        for results in settings.values()
        for method in methods
        for eta in ETAS
        if (found := results.interval(final, method, eta)) is not None
    ]
    return max(0.0, min(lows) // 10 * 10), 100.0


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
