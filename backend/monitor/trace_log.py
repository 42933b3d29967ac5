"""Writes the trace of a run: one JSON object per event. ``slipstream simulate --fit`` reads it.

The driver writes about steps and publications, a collector about its requests, each into its own file.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from slipstream.rollout.system.lines import LineFile
from slipstream.rollout.system.log_thread import LogThread

log = logging.getLogger(__name__)

TRACES = "trace*.jsonl"
"""Files in the run folder. Their times are seconds of the machine's monotonic clock."""

MOST_SECONDS = 1000
"""Seconds whose events may wait for the thread."""

_encoder = msgspec.json.Encoder()


class TraceLog:
    """Appends events to the trace. A thread writes them, each second that has some: nobody waits for it."""

    def __init__(
        self,
        folder: Path,
        writer: str = "",
        clock: Callable[[], float] = time.monotonic,
        note: Callable[[str], None] = log.warning,
    ) -> None:
        """``writer``: name of the process, unless it is the driver. ``note``: as of ``LineFile``."""
        name = f"trace-{writer}.jsonl" if writer else "trace.jsonl"
        self._file = LineFile(folder / name, note)
        self._thread = LogThread(name, MOST_SECONDS, "seconds", note)
        self._events: list[bytes] = []
        self._clock = clock
        self._flushed_s = clock()

    def write(self, kind: str, **values: object) -> None:
        """Append an event. Seconds and other floats are rounded to six decimals."""
        rounded = {key: round(v, 6) if isinstance(v, float) else v for key, v in values.items()}
        self._events.append(_encoder.encode({"kind": kind, **rounded}))
        if self._clock() - self._flushed_s >= 1:
            self._hand_over()
            self._flushed_s = self._clock()

    def flush(self) -> bool:
        """Wait until every event is written, or waits for a disk that fails. As of ``LogThread``."""
        self._hand_over()
        return self._thread.flush()

    def close(self) -> None:
        """Write all events and close the file. A disk that stalls is waited for as by ``flush``."""
        if self.flush():
            self._file.close()

    def _hand_over(self) -> None:
        events, self._events = self._events, []
        self._thread.offer(lambda: self._write(events))

    def _write(self, events: Sequence[bytes]) -> None:
        for event in events:
            self._file.add(event)
        self._file.flush()
