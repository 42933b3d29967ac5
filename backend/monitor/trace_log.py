"""Writes the trace of a run: one JSON object per event. ``slipstream simulate --fit`` reads it.

The driver writes about steps and publications, a collector about its requests, each into its own file.
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from slipstream.rollout.system.lines import drop_unfinished_line

TRACES = "trace*.jsonl"
"""Files in the run folder. Their times are seconds of the machine's monotonic clock."""

_encoder = msgspec.json.Encoder()


class TraceLog:
    """Appends events to the trace, and flushes them when the last flush is a second or more ago.

    A killed run may leave its last line unfinished; opening the trace again removes that line.
    """

    def __init__(self, folder: Path, writer: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """``writer``: name of the process, unless it is the driver."""
        path = folder / (f"trace-{writer}.jsonl" if writer else "trace.jsonl")
        drop_unfinished_line(path)
        self._file = path.open("ab")
        self._clock = clock
        self._flushed_s = clock()

    def write(self, kind: str, **values: object) -> None:
        """Append an event. Seconds and other floats are rounded to six decimals."""
        rounded = {key: round(v, 6) if isinstance(v, float) else v for key, v in values.items()}
        self._file.write(_encoder.encode({"kind": kind, **rounded}) + b"\n")
        if self._clock() - self._flushed_s >= 1:
            self._file.flush()
            self._flushed_s = self._clock()

    def close(self) -> None:
        self._file.close()
