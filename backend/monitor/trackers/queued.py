"""A tracker with a queue and a thread: the run never waits for it."""

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from slipstream.backend.monitor.metrics import MetricsRecord
from slipstream.rollout.system.durable import write_durably


def tracked_id(folder: Path, tracker: str, make: Callable[[], str]) -> str:
    """Return the id that the run in ``folder`` has at a tracker, or make one and remember it.

    Raises OSError, and whatever ``make`` raises.
    """
    path = folder / f"{tracker}-run.txt"
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    made = make()
    write_durably(path, made + "\n")
    return made


MOST_RECORDS = 1000
"""Records that may wait: hours of steps. More are left out, and the run's own files have them."""

RETRY_S = 60.0
"""Seconds between two attempts at a service that has failed."""


class Tracker(Protocol):
    """A service that shows metrics. Used from one thread; it may raise anything."""

    @property
    def setting(self) -> str:
        """The section of the recipe, for messages."""
        ...

    def start(self) -> None:
        """Connect. Called again if it has raised."""
        ...

    def log(self, record: MetricsRecord) -> None: ...
    def finish(self) -> None:
        """Send what is left. Called only after a ``start`` that has returned."""
        ...


class QueuedTracker:
    """A sink of metrics. Its thread begins at once, so that a wrong address is told before the first step."""

    def __init__(
        self,
        tracker: Tracker,
        note: Callable[[str], None],
        *,
        timeout_s: float,
        retry_s: float = RETRY_S,
        most: int = MOST_RECORDS,
    ) -> None:
        """``note``: tells the user something. ``timeout_s``: longest wait at the end."""
        self._tracker, self._note = tracker, note
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._queue: queue.Queue[MetricsRecord] = queue.Queue(most)
        self._closing = threading.Event()
        self._is_told = False
        self.left_out = 0
        """Number of records that did not fit the queue, or that the service has refused."""
        self._thread = threading.Thread(target=self._run, name=tracker.setting, daemon=True)
        self._thread.start()

    def put(self, record: MetricsRecord) -> None:
        """Take a record, or leave it out if too many wait."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.left_out += 1

    def close(self) -> None:
        """Send what waits, for ``timeout_s`` at most, and tell what was left out."""
        self._closing.set()
        self._thread.join(self._timeout_s)
        left_out = self.left_out + self._queue.qsize()
        if self._thread.is_alive():
            self._is_told = True  # of what happens from here on, nobody hears
            self._note(f"{self._tracker.setting}: not everything was sent within {self._timeout_s:g} s")
        elif left_out:
            self._note(f"{self._tracker.setting}: {left_out} records were left out; metrics.jsonl has them")

    def _run(self) -> None:
        if not self._started():
            return
        while not (self._closing.is_set() and self._queue.empty()):
            try:
                self._send(self._queue.get(timeout=0.2))
            except queue.Empty:
                continue
        self._attempt(self._tracker.finish)

    def _started(self) -> bool:
        """Connect, however often it takes. Return False if the last attempt, at the end of the run, fails."""
        while not self._attempt(self._tracker.start):
            if self._closing.is_set():
                return False
            self._closing.wait(self._retry_s)
        return True

    def _send(self, record: MetricsRecord) -> None:
        """Send a record, and again some time later if need be."""
        if self._attempt(lambda: self._tracker.log(record)):
            return
        self._closing.wait(self._retry_s)
        if not self._attempt(lambda: self._tracker.log(record)):
            self.left_out += 1

    def _attempt(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            self._tell(f"{type(error).__name__}: {error}")
            return False
        return True

    def _tell(self, reason: str) -> None:
        """Tell the first failure; the run goes on with all of them."""
        if not self._is_told:
            self._is_told = True
            began = time.strftime("%H:%M:%S")
            self._note(
                f"{self._tracker.setting}: no metrics there since {began} ({reason[:300]}); the run goes on, "
                f"and every {self._retry_s:g} s it is tried again"
            )
