"""A log whose size is bounded, however much is printed. The keeper imports it: keep it light."""

import os
import time
from collections.abc import Callable
from contextlib import suppress

BURST = 1 << 20
"""Bytes that are written at once. What is printed beyond it, and beyond the rate, is dropped."""

RATE = 32 << 10
"""Bytes per second that may be written for hours."""

LARGEST_FILE = 2 << 20
"""Bytes of the file. A full one is renamed to NAME.1, in place of the one before."""

TAIL = 16 << 10
"""Bytes of the newest output, which are always kept for error messages."""


class BoundedLog:
    """Appends output to a file, up to a rate and a size, and remembers the newest."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._budget = float(BURST)
        self._refilled = clock()
        self._dropped = 0
        self.tail = b""
        """The newest output, whether it was written or dropped."""

    def write(self, data: bytes) -> None:
        """Append ``data``, or as much of it as the rate allows."""
        self.tail = data[-TAIL:] if len(data) >= TAIL else (self.tail + data)[-TAIL:]
        now = self._clock()
        self._budget = min(BURST, self._budget + (now - self._refilled) * RATE)
        self._refilled = now
        if self._dropped and self._budget < BURST / 2:  # one gap is better to read than a thousand
            self._dropped += len(data)
            return
        written = data[: int(self._budget)]
        self._budget -= len(written)
        self._append(self._gap() + written)
        self._dropped = len(data) - len(written)

    def close(self) -> None:
        """Append the newest output, if it was dropped."""
        if self._dropped:
            missing = self.tail[-self._dropped :]
            self._dropped -= len(missing)
            self._append(self._gap() + missing)
            self._dropped = 0

    def _gap(self) -> bytes:
        return b"\n[... %d bytes dropped ...]\n" % self._dropped if self._dropped else b""

    def _append(self, data: bytes) -> None:
        with suppress(OSError):  # a full disk costs the log, never a reward
            with suppress(FileNotFoundError):
                if os.path.getsize(self._path) + len(data) > LARGEST_FILE:
                    os.replace(self._path, f"{self._path}.1")
            with open(self._path, "ab", buffering=0) as file:
                file.write(data)
