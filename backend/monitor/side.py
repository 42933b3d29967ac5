"""Metrics that nobody has at hand when a step ends: a thread of the driver finds them now and then.

every EVERY_S: sources ──► thread ──► ``latest``, which the recorder logs with the next step
"""

import threading
from collections.abc import Callable, Mapping, Sequence

from slipstream.backend.monitor.metrics import Value

EVERY_S = 10.0
"""Seconds between two samples."""

CLOSE_TIMEOUT_S = 10.0
"""Longest wait for a sample that is being taken at the end."""

Source = Callable[[], Mapping[str, Value]]
"""Returns metrics by the tags of ``tags.py``. Called from the thread."""


class SideMetrics:
    """Asks its sources now and then. ``close`` ends the thread."""

    def __init__(
        self, sources: Sequence[Source], note: Callable[[str], None], *, every_s: float = EVERY_S
    ) -> None:
        """``note``: hears once when a source begins to fail; the run goes on without its metrics."""
        self._sources, self._note, self._every_s = list(sources), note, every_s
        self._failing: set[Source] = set()
        self._values: dict[str, Value] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="side metrics", daemon=True)
        self._thread.start()

    def latest(self) -> dict[str, Value]:
        """Return the latest metrics: numbers every time, and texts once. Does not wait."""
        with self._lock:
            values = self._values
            self._values = {tag: value for tag, value in values.items() if not isinstance(value, str)}
        return values

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.ask()

    def ask(self) -> None:
        """Ask every source once."""
        for source in self._sources:
            try:
                values = source()
            except Exception as error:
                if not self._ended.is_set() and source not in self._failing:
                    kind = type(error).__name__
                    self._note(f"some metrics are missing until they can be had ({kind}: {error})")
                self._failing.add(source)
                continue
            self._failing.discard(source)
            with self._lock:
                self._values = {**self._values, **values}
