"""Writes the trace of a run: one JSON object per event. ``slipstream simulate --fit`` reads it.

The driver writes about steps and publications, a collector about its requests, each into its own file.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from slipstream.rollout.system.lines import LineFile

log = logging.getLogger(__name__)

TRACES = "trace*.jsonl"
"""Files in the run folder. Their times are seconds of the machine's monotonic clock."""

_encoder = msgspec.json.Encoder()


class TraceLog:
    """Appends events to the trace, and flushes them when the last flush is a second or more ago."""

    def __init__(
        self,
        folder: Path,
        writer: str = "",
        clock: Callable[[], float] = time.monotonic,
        note: Callable[[str], None] = log.warning,
    ) -> None:
        """``writer``: name of the process, unless it is the driver. ``note``: as of ``LineFile``."""
        self._file = LineFile(folder / (f"trace-{writer}.jsonl" if writer else "trace.jsonl"), note)
        self._clock = clock
        self._flushed_s = clock()

    def write(self, kind: str, **values: object) -> None:
        """Append an event. Seconds and other floats are rounded to six decimals."""
        rounded = {key: round(v, 6) if isinstance(v, float) else v for key, v in values.items()}
        self._file.add(_encoder.encode({"kind": kind, **rounded}))
        if self._clock() - self._flushed_s >= 1:
            self._file.flush()
            self._flushed_s = self._clock()

    def close(self) -> None:
        self._file.close()
