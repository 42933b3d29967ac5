"""Writes the trace of a run: one JSON object per event. ``slipstream simulate --fit`` reads it."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from slipstream.backend.monitor.lines import drop_unfinished_line

TRACE = "trace.jsonl"
"""File in the run folder. Its times are seconds of the machine's monotonic clock."""


class TraceLog:
    """Appends events to the trace, and flushes them when the last flush is a second or more ago.

    A killed run may leave its last line unfinished; opening the trace again removes that line.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        drop_unfinished_line(folder / TRACE)
        self._file = (folder / TRACE).open("a", encoding="utf-8")
        self._clock = clock
        self._flushed_s = clock()

    def write(self, kind: str, **values: object) -> None:
        """Append an event. Seconds and other floats are rounded to six decimals."""
        rounded = {key: round(v, 6) if isinstance(v, float) else v for key, v in values.items()}
        self._file.write(json.dumps({"kind": kind, **rounded}) + "\n")
        if self._clock() - self._flushed_s >= 1:
            self._file.flush()
            self._flushed_s = self._clock()

    def close(self) -> None:
        self._file.close()
