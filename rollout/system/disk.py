"""What goes wrong with the file system of a run: what to do about errors, and who waits while it stalls.

    with waits_for_disk("ledger.sqlite"):   # in a thread that others wait for
        write()

A write to a file system that stalls neither returns nor fails. Only another thread can tell of it.
"""

import errno
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

STALL_S = 10.0
"""Time from which a write that has not come back is told of."""

LOOK_S = 5.0
"""Seconds between two looks at the writes that have not come back."""

ADVICE = {
    errno.ENOSPC: "free space on this file system",
    errno.EDQUOT: "your quota is used up: free space, or have it raised",
    errno.EFBIG: "the limit on file sizes (ulimit -f) is too low for this file",
    errno.EROFS: "the file system is read-only: remount it, or put run.root elsewhere",
    errno.EACCES: "give the user of this run write access, or put run.root elsewhere",
    errno.EPERM: "give the user of this run write access, or put run.root elsewhere",
    errno.EIO: "the disk or its server has failed: look at `dmesg` and at the state of the file system",
    errno.ESTALE: "the file system was exported anew, or the folder was replaced: mount it again",
    errno.ENOTCONN: "the file system is not mounted any more: mount it again",
    errno.ETIMEDOUT: "the server of the file system does not answer: wait until it does",
    errno.ENOLCK: "the file system has no locks to give: restart its lock daemon, or mount it with locks",
}
"""What to do about an error of the disk, by its number."""

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors that end when somebody makes room."""


_waiting: dict[object, tuple[str, float, str]] = {}
"""Writes of this process that have not come back: what they write, and when they began, twice."""


@contextmanager
def waits_for_disk(what: str) -> Generator[None]:
    """Let ``telling_of_stalls`` know that the block writes ``what``. Callable in any thread."""
    this = object()
    _waiting[this] = what, time.monotonic(), time.strftime("%T")
    try:
        yield
    finally:
        del _waiting[this]


@contextmanager
def telling_of_stalls(note: Callable[[str], None], meanwhile: str) -> Generator[None]:
    """Say inside the block who of this process waits for the disk since when, and when it answers again.

    ``note`` is called in a thread of its own. ``meanwhile``: says what goes on and what does not.
    """
    ended = threading.Event()

    def tell() -> None:
        began = None
        while not ended.wait(LOOK_S):
            now = time.monotonic()
            waiting = sorted((since, what, at) for what, since, at in list(_waiting.values()))
            is_late = bool(waiting) and now - waiting[0][0] >= STALL_S
            if is_late and began is None:
                began = waiting[0][0]
                who = ", ".join(f"{what} waits since {at}" for _, what, at in waiting)
                note(f"the disk does not answer: {who}. {meanwhile}")
            elif not is_late and began is not None:
                note(f"the disk answers again, after {now - began:.0f} s")
                began = None

    threading.Thread(target=tell, name="stalls of the disk", daemon=True).start()
    try:
        yield
    finally:
        ended.set()  # not joined: a note may itself wait for the disk


def describe(error: OSError) -> str:
    """Return what went wrong with which file, and what to do about it."""
    where = f" ({error.filename})" if error.filename else ""
    advice = ADVICE.get(error.errno or 0)
    return f"{error.strerror or error}{where}" + (f"; {advice}" if advice else "")
