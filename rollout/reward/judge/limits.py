"""Keeps a reward within its bounds inside its process: time, memory, forks, the working directory."""

import faulthandler
import gc
import os
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from slipstream.rollout.system.garbage import return_free_memory

SHARE = 0.75
"""Part of the memory above the start's that may be in use between two questions."""

_PAGE = resource.getpagesize()


class Watchdog:
    """Ends the process after a time, whatever it does: a thread in C that needs no lock of Python's.

    The traceback of every thread goes to the crash pipe first.
    """

    def __init__(self, crash: int) -> None:
        self._crash = crash

    def arm(self, seconds: float) -> None:
        """End the process in ``seconds``. Replaces the time before."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._crash)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()


class MemoryWatch:
    """Says when the process should be replaced because it holds too much memory between its questions.

    It counts what RLIMIT_DATA counts, so that a process is replaced before its allocations fail. Resident
    memory would miss what is allocated and not used yet, and would count files that are only mapped.
    """

    def __init__(self, memory_mb: int | None) -> None:
        self._most: float | None = None
        if memory_mb is not None:
            start = self._used()
            self._most = start + SHARE * max(0, (memory_mb << 20) - start)

    def verdict(self) -> str | None:
        """Return why the process should be replaced; None: it may go on."""
        try:
            if self._most is None or self._used() <= self._most:
                return None
            gc.collect()
            return_free_memory()
            used = self._used()
        except OSError as error:  # user code leaks file descriptors
            return f"it cannot open files any more: {error}"
        return None if used <= self._most else f"it holds {used >> 20} MB between questions"

    @staticmethod
    def _used() -> int:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(256).split()[5]) * _PAGE


class ForkGuard:
    """Takes the judge's connection away from forks: what they compute is no answer.

    A fork that returns from the reward would otherwise go on as a second judge.
    """

    def __init__(self, connection: socket.socket, crash: int) -> None:
        self._connection = connection
        self._crash = crash
        self._pid = os.getpid()
        self.in_fork: Callable[[], None] = lambda: None
        """Called in every fork, before user code goes on there."""
        os.register_at_fork(after_in_child=self._cut)

    def _cut(self) -> None:
        faulthandler.enable(2)
        with suppress(OSError):
            os.close(self._crash)
        self._connection.close()
        self.in_fork()

    def leave_if_forked(self) -> None:
        """End this process at once, if it is a fork of the judge."""
        if os.getpid() != self._pid:
            os._exit(0)


class WorkingDirectory:
    """The directory in which the reward was constructed. A question leaves it for itself only."""

    def __init__(self) -> None:
        self._fd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def restore(self) -> None:
        with suppress(OSError):  # user code has closed every descriptor
            os.fchdir(self._fd)


@dataclass(frozen=True)
class Bounds:
    """All bounds of one judge process."""

    timeout_s: float
    """Seconds for one question."""
    watchdog: Watchdog
    memory: MemoryWatch
    forks: ForkGuard
    home: WorkingDirectory
    section: str
    """Section of the recipe with the settings, for messages."""
