"""Lets processes of this machine write down where they stand, also those that hang in C.

A handler in C writes the stacks of all threads, so that it runs while Python does not, as in a collective. A
process that is stopped writes nothing, and is named.
"""

import faulthandler
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

FOLDER = "stacks"
"""Folder in that of the logs."""

WRITE_S = 2.0
"""Longest wait for a process to write its stacks. The handler takes some milliseconds."""

VARIABLE = "SLIPSTREAM_STACKS"
"""Environment variable with the file of stacks of a process that starts others."""

POLL_S = 0.02
"""Seconds between two looks at a file: no event tells of another process's writing."""

_STOPPED = {"T": "is stopped by a signal", "t": "is stopped by a debugger", "Z": "has ended"}
_SILENT = {"D": "waits for a device"}


def shows_stacks(path: Path) -> None:
    """Let this process, and each that is forked from it, append its stacks to a file when it gets SIGUSR1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.register(signal.SIGUSR1, path.open("a"), all_threads=True)  # the file stays open


def write_stacks(pid: int, path: Path, name: str) -> str | None:
    """Let a process that ``shows_stacks`` append them to ``path``, below a line with its ``name``.

    Return why it has written none; None: it has. Processes that share a file are asked one after the other.
    """
    if (state := _state(pid)) in _STOPPED:
        return _STOPPED[state]
    try:
        with path.open("r+") as file:  # the process has made it
            file.seek(0, os.SEEK_END)
            print(f"{time.strftime('%F %T')}: {name} (process {pid})", file=file)
        before = size = path.stat().st_size
        os.kill(pid, signal.SIGUSR1)
    except OSError:
        return "has ended"
    deadline = time.monotonic() + WRITE_S
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        size, earlier = path.stat().st_size, size
        if before < size == earlier:
            return None
    state = _state(pid)
    return None if size > before else (_STOPPED | _SILENT).get(state, "does not react to a signal")


def showing(pids: Iterable[int]) -> list[int]:
    """Return the processes that have a handler for SIGUSR1. The signal ends any other one."""
    return [pid for pid in pids if _handles(pid)]


def _handles(pid: int) -> bool:
    with suppress(OSError):  # processes come and go
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
    return False


def _state(pid: int) -> str:
    """Return Linux's letter for what a process does; that of a zombie if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"
