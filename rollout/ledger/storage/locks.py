"""Tries out the locks of a file system. Network file systems may refuse them, or grant them to everybody."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile

CHILD_TIMEOUT_S = 60.0

_SECOND_HANDLE = """
import fcntl, sys
with open(sys.argv[2], "r+") as file:
    try:
        getattr(fcntl, sys.argv[1])(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print("refused")
    else:
        print("granted")
"""
"""Program of the process that tries to get a lock which the first process holds."""


def flock(descriptor: int) -> None:
    """Lock an open file exclusively until it is closed, which the end of the process does.

    Raises BlockingIOError while another process has it, and OSError where there are no locks.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lockf(descriptor: int) -> None:
    """Lock an open file as SQLite does (fcntl). Raises as ``flock``."""
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


LockCall = Callable[[int], None]


def fcntl_error(folder: Path) -> str | None:
    """Return why SQLite could not lock a file in ``folder``; None if it could, or if it cannot be tried."""
    if not os.access(folder, os.W_OK):
        return None
    with NamedTemporaryFile(dir=folder, prefix=".locks-") as file:
        return _refusal(lockf, file.fileno())


def lock_problem(folder: Path, calls: tuple[LockCall, ...] = (flock, lockf)) -> str | None:
    """Return why locks do not keep two processes apart in ``folder``; None if they do. Raises OSError."""
    for call in calls:
        with NamedTemporaryFile(dir=folder, prefix=".locks-") as file:
            if refusal := _refusal(call, file.fileno()):
                return f"{call.__name__}: {refusal}"
            try:
                answer = _second_handle(call.__name__, file.name)
            except subprocess.SubprocessError as error:
                return f"{call.__name__}: cannot be tried: {error}"
            if answer != "refused":
                return f"{call.__name__}: two processes got the same lock at once"
    return None


def _refusal(call: LockCall, descriptor: int) -> str | None:
    try:
        call(descriptor)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _second_handle(name: str, path: str) -> str:
    """Try to get a lock in a process of its own, which opens the file by itself."""
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _SECOND_HANDLE, name, path],
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=True,
    )
    return ended.stdout.strip()
