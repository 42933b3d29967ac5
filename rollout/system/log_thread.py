"""Threads that write logs, so that nothing else waits for text, JSON and the disk."""

import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from slipstream.rollout.system.disk import describe, waits_for_disk
from slipstream.rollout.system.lines import LineFile

FLUSH_TIMEOUT_S = 60.0
"""Longest wait for the thread at the end of a run."""

PIPE_BYTES = 1 << 16
"""Bytes that are read from a pipe at once, and the length from which a line is cut."""

MOST_CHUNKS, MOST_PRINTED = 100_000, 64 << 20
"""Largest number and bytes of what was read from a pipe and waits for the disk."""

Job = Callable[[], object]


def to_stderr(text: str) -> None:
    """Write a note into the log of the process, whose disk may be the one that the note is about."""
    with suppress(OSError):
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
        self._queue: queue.Queue[tuple[Job, int] | threading.Event | None] = queue.Queue(most)
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

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until everything is written. Return False if that takes longer than ``timeout_s``."""
        written = threading.Event()
        try:
            self._queue.put(written, timeout=timeout_s)
        except queue.Full:
            return False
        return written.wait(timeout_s)

    def end(self) -> None:
        """End the thread after the jobs that wait."""
        self._queue.put(None)

    def ended(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
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


class PipedLog:
    """A file of what other processes print. It comes through a pipe: no disk holds them up, or ends them.

    log = PipedLog(path)
    subprocess.Popen(..., stdout=log.descriptor, stderr=log.descriptor)
    log.begins()
    """

    def __init__(self, path: Path, note: Callable[[str], None] = to_stderr) -> None:
        """``note``: as of ``LineFile``. Raises OSError."""
        self._file = LineFile(path, note)
        self._thread = LogThread(path.name, MOST_CHUNKS, "chunks", note, most_bytes=MOST_PRINTED)
        self._pipe, self.descriptor = os.pipe()
        self._reader = threading.Thread(target=self._read, name=f"{path.name}, read", daemon=True)

    def begins(self) -> None:
        """Read until the last process that has the descriptor has ended."""
        os.close(self.descriptor)
        self._reader.start()

    def flush(self, timeout_s: float, *, ended: bool = False) -> None:
        """Wait until what was read is written. ``ended``: the processes have, so that nothing more comes."""
        if ended:
            self._reader.join(timeout_s)
        if self._reader.is_alive():
            self._thread.flush(timeout_s)
        else:
            self._thread.ended(timeout_s)

    def _read(self) -> None:
        line = b""
        with open(self._pipe, "rb", buffering=0) as pipe:
            while data := pipe.read(PIPE_BYTES):
                *lines, line = (line + data).split(b"\n")
                if len(line) >= PIPE_BYTES:
                    lines, line = [*lines, line], b""
                self._thread.offer(partial(self._write, lines), len(data))
        self._thread.offer(partial(self._write, [line] if line else []))
        self._thread.put(self._file.close)
        self._thread.end()

    def _write(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            self._file.add(line)
        self._file.flush()
