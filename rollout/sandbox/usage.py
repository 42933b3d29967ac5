"""Sums the resources that a command and its descendants use, as the kernel counts it for each process."""

import os
from contextlib import suppress
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

_USER_TIME, _THREADS, _RESIDENT = 11, 17, 21
"""Fields of /proc/PID/stat, counted after the name. Four times begin at _USER_TIME: in user mode and in the
kernel, of the process and of its ended children."""


@dataclass(frozen=True)
class Usage:
    """The resources that processes use at one time."""

    pids: tuple[int, ...]
    tasks: int
    """Processes and threads."""
    cpu_s: float
    """Processor time, with that of children that have ended and were waited for."""
    resident: int
    """Bytes of memory. Pages that several processes share count for each."""


def below(root: int) -> Usage:
    """Return what the descendants of a process use, and the time of those that ended as its children."""
    pids: list[int] = []
    tasks, ticks, pages = 0, 0, 0
    with suppress(OSError, IndexError), open(f"/proc/{root}/stat", "rb") as file:
        ticks += sum(map(int, file.read().rpartition(b")")[2].split()[_USER_TIME + 2 : _USER_TIME + 4]))
    todo = _children(root)
    while todo:
        pid = todo.pop()
        with suppress(OSError, IndexError):  # processes come and go
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            pids.append(pid)
            tasks += int(fields[_THREADS])
            ticks += sum(map(int, fields[_USER_TIME : _USER_TIME + 4]))
            pages += int(fields[_RESIDENT])
            todo += _children(pid)
    return Usage(tuple(pids), tasks, ticks / _TICKS, pages * _PAGE)


def memory_of(pids: tuple[int, ...]) -> int:
    """Return the bytes of memory that processes have written to. A page that n of them share counts once."""
    return sum(map(_memory_of, pids))


def tasks_of(user: int) -> int:
    """Return the number of processes and threads of a user on this machine."""
    tasks = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, IndexError):
            if os.stat(f"/proc/{pid}").st_uid == user:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    tasks += int(file.read().rpartition(b")")[2].split()[_THREADS])
    return tasks


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                children += map(int, file.read().split())
    return children


def _memory_of(pid: int) -> int:
    with suppress(OSError):
        return _kilobytes(f"/proc/{pid}/smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:")) << 10
    with suppress(OSError):  # its memory is not ours to look at
        return _kilobytes(f"/proc/{pid}/status", (b"RssAnon:", b"RssShmem:")) << 10
    return 0


def _kilobytes(path: str, names: tuple[bytes, ...]) -> int:
    with open(path, "rb") as file:
        rows = (line.split() for line in file)
        return sum(int(row[1]) for row in rows if row and row[0] in names)
