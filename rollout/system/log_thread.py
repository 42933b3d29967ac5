"""Threads that write the logs of a process, so that nothing else waits for text, JSON and the disk."""

import queue
import sys
import threading
from collections.abc import Callable

from slipstream.rollout.system.disk import describe, waits_for_disk

FLUSH_TIMEOUT_S = 60.0
"""Longest wait for the thread at the end of a run."""

Job = Callable[[], object]


def to_stderr(text: str) -> None:
    """Write a note into the log of the process."""
    print(text, file=sys.stderr, flush=True)


class LogThread:
    """Does queued jobs in their order. A job that raises is told of, and costs what it was to write."""

    def __init__(
        self,
        log: str,
        most: int,
        what: str,
        note: Callable[[str], None] = to_stderr,
        *,
        most_bytes: int | None = None,
    ) -> None:
        """``log``: its name in notes. ``most``: number of jobs that may wait. ``what``: name of what jobs
        write, in the plural. ``most_bytes``: bytes that waiting jobs may hold; None: any number.
        """
        self._log, self._what, self._note = log, what, note
        self._queue: queue.Queue[tuple[Job, int] | threading.Event] = queue.Queue(most)
        self._most_bytes = most_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self.left_out = 0
        """Number of jobs that were left out, because too many jobs or bytes waited for the thread."""
        self._failed = 0
        """Number of jobs that raised."""
        self._thread = threading.Thread(target=self._run, name=log, daemon=True)
        self._thread.start()

    def offer(self, job: Job, size: int = 0) -> None:
        """Queue a job that holds ``size`` bytes, or leave it out if too many jobs or bytes wait already."""
        if self._most_bytes is None or self._bytes + size <= self._most_bytes:
            try:
                self._queue.put_nowait((job, size))
            except queue.Full:
                pass
            else:
                self._hold(size)
                return
        self.left_out += 1
        if self.left_out.bit_count() == 1:
            self._note(f"{self._log}: {self.left_out} {self._what} left out, because writing takes longer")

    def put(self, job: Job) -> None:
        """Queue a job. Waits while too many wait already."""
        self._queue.put((job, 0))

    def flush(self) -> bool:
        """Wait until everything is written, a minute at most. Return False if the minute was too short."""
        written = threading.Event()
        try:
            self._queue.put(written, timeout=FLUSH_TIMEOUT_S)
        except queue.Full:
            return False
        return written.wait(FLUSH_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            job, size = item
            try:
                with waits_for_disk(self._log):
                    job()
            except Exception as error:  # the run goes on without what the job was to write
                self._tell(error)
            self._hold(-size)

    def _tell(self, error: Exception) -> None:
        self._failed += 1
        if self._failed.bit_count() == 1:
            why = describe(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._note(f"{self._log}: {self._failed} {self._what} could not be written, the last time: {why}")

    def _hold(self, more: int) -> None:
        with self._lock:
            self._bytes += more
