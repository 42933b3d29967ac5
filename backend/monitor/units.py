"""Formats of numbers for people who read them on a terminal."""

import math


def seconds(value: float) -> str:
    """Format a duration: ``0.48 s``, ``7.3 s``, ``42 s``, ``3:05``, ``1:02:30``."""
    if value < 1:
        return f"{value:.2f} s"
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 59.5:
        return f"{value:.0f} s"
    return clock_face(value)


def clock_face(value: float) -> str:
    """Format seconds as a clock shows them: ``0:07``, ``3:05``, ``1:02:30``."""
    minutes, second = divmod(round(value), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def reward(value: float, *, is_accuracy: bool = False) -> str:
    """Format a reward: ``0.531``, ``-1.000``, ``1.23e+06``, or ``53.1%`` for an accuracy that can be one.

    NaN, the mean of a batch without rewards: ``-``.
    """
    if math.isnan(value):
        return "-"
    if is_accuracy and 0 <= value <= 1:
        return f"{value:.1%}"
    return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.3g}"


def count(value: float) -> str:
    """Format a number in at most four digits and a letter: ``812``, ``8.1k``, ``12.3M``, ``1.2G``."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"
