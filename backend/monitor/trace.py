"""What happened when: one JSON object per line in the run folder. ``slipstream simulate --fit`` reads it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRACE = "trace.jsonl"
"""In the run folder. Times are seconds of the machine's monotonic clock."""


class TraceLog:
    """Appends; whole lines are flushed at least once a second while there are any."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = (folder / TRACE).open("a", encoding="utf-8")
        self._clock = clock
        self._flushed_s = clock()

    def write(self, kind: str, **values: Any) -> None:
        rounded = {key: round(v, 6) if isinstance(v, float) else v for key, v in values.items()}
        self._file.write(json.dumps({"kind": kind, **rounded}) + "\n")
        if self._clock() - self._flushed_s >= 1:
            self._file.flush()
            self._flushed_s = self._clock()

    def close(self) -> None:
        self._file.close()
