"""One buffer of bytes for many arrays, so that they travel together. Pure: numpy in, numpy out."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

ALIGNMENT = 16
"""Bytes. A view of another dtype must begin at a multiple of its element's size."""


class ArraySlot(NamedTuple):
    """The place of one array in a buffer."""

    start: int
    stop: int
    """Without the padding behind it."""
    dtype: np.dtype
    shape: tuple[int, ...]


def slots_of(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, ArraySlot], int]:
    """Return the slot of each array, and the size of the buffer in bytes.

    >>> slots, size = slots_of({"a": np.zeros(3, np.int32), "b": np.zeros((2, 2))})
    >>> slots["b"].start, slots["b"].stop, size
    (16, 48, 48)
    """
    slots: dict[str, ArraySlot] = {}
    size = 0
    for name, array in arrays.items():
        slots[name] = ArraySlot(size, size + array.nbytes, array.dtype, array.shape)
        size += array.nbytes + -array.nbytes % ALIGNMENT
    return slots, size


def fill(buffer: np.ndarray, slots: Mapping[str, ArraySlot], arrays: Mapping[str, np.ndarray]) -> None:
    """Copy the arrays into their slots of ``buffer``, which holds bytes (uint8)."""
    for name, array in arrays.items():
        slot = slots[name]
        buffer[slot.start : slot.stop].view(slot.dtype).reshape(slot.shape)[...] = array
