"""What a process that keeps others asks of the kernel: everything that they have started is its own.

A subreaper adopts the processes whose parents have ended, so that it can end all of them. Imports nothing
heavy: keepers are many.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress

DEATH_SIGNAL, NAME, SUBREAPER = 1, 15, 36
"""Options of ``set_process_option``: PR_SET_PDEATHSIG, PR_SET_NAME and PR_SET_CHILD_SUBREAPER of
linux/prctl.h."""

_libc = ctypes.CDLL(None, use_errno=True)


def set_process_option(option: int, value: int | bytes) -> None:
    """Set an option of this process. Raises OSError."""
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if _libc.prctl(option, argument, *map(ctypes.c_ulong, (0, 0, 0))):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def has_children() -> bool:
    """Return whether this process has children, adopted ones included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def ended_children() -> Iterator[tuple[int, int]]:
    """Yield every child that has ended, adopted ones included, with its wait status."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def children_of(parent: int) -> list[int]:
    """Return the children of a process that have not ended."""
    children: list[int] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # processes come and go
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            if int(fields[1]) == parent and fields[0] != b"Z":
                children.append(int(pid))
    return children
