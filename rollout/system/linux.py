"""Calls of Linux about processes that Python's library does not have. Keepers import it: keep it light."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME = 1, 4, 15
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_SECUREBITS = 22, 24, 28
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
"""From linux/prctl.h."""

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, *arguments: int | bytes) -> None:
    """Change a property of the calling process. Raises OSError."""
    values = [
        ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value) for value in arguments
    ]
    values += [ctypes.c_ulong(0)] * (4 - len(values))
    if _libc.prctl(option, *values):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def adopt_orphans() -> None:
    """Make this process the parent of every process below it whose own parent has ended. Raises OSError."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def has_children() -> bool:
    """True if this process has children, adopted ones included."""
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
    """Return the ids of the living children of a process."""
    children: list[int] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # processes come and go
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            if int(fields[1]) == parent and fields[0] != b"Z":
                children.append(int(pid))
    return children


def kill_users_of(temporary: str) -> None:
    """Kill every process that was started with ``temporary`` as its folder for temporary files."""
    variable = f"TMPDIR={temporary}".encode()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:  # processes come and go
            if variable in file.read().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
