"""Shortages of this process, which say nothing about the server that it was about to reach.

A process that has no free file descriptor, port or memory cannot open a connection to any engine. Taken for
the end of an engine, such an error would have all engines restarted, and none would be reached afterwards.
"""

import errno
import logging
import socket
import time
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
"""Errors of a process or machine that is short of descriptors, ports, buffers or memory."""

UNRESOLVED = frozenset({socket.EAI_AGAIN, socket.EAI_MEMORY})
"""Errors of a resolver that may know the name later. Without descriptors it can ask nobody."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0

PERIOD_S = 30.0
"""Time between two messages about shortages."""


def is_local(error: BaseException) -> bool:
    """True if an error of the network is a shortage of this process.

    Libraries wrap errors: with the same number, or with the original one as the cause.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return cause.errno in UNRESOLVED
        if isinstance(cause, OSError) and cause.errno in SHORT:
            return True
        cause = cause.__cause__
    return False


def pauses() -> Iterator[float]:
    """Yield the seconds to wait before each further attempt, forever."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class ShortageLog:
    """Names the shortages of a process in its log, at most once in ``PERIOD_S``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s: float | None = None
        self._unnamed = 0

    def note(self, error: BaseException) -> None:
        """Take note of an attempt that has failed."""
        self._unnamed += 1
        now_s = self._clock()
        if self._next_s is not None and now_s < self._next_s:
            return
        log.warning(
            "this process cannot open connections (%d attempts failed; the last one: %s); no engine is to "
            "blame, and requests wait. If descriptors are short, raise the limit (`ulimit -n`) or lower "
            "rollout.max_concurrent",
            self._unnamed,
            error,
        )
        self._next_s, self._unnamed = now_s + PERIOD_S, 0


SHORTAGES = ShortageLog()
"""The log of this process."""
