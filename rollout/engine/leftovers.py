"""Removes shared memory and files that processes leave behind when SIGKILL gives them no time to clean up."""

import os
import shutil
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


def members(process_group: int) -> list[int]:
    """Return the ids of the processes in a group."""
    pids: list[int] = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(ProcessLookupError):  # processes come and go
            if os.getpgid(pid) == process_group:
                pids.append(pid)
    return pids


def shared_memory_of(processes: Iterable[int]) -> set[Path]:
    """Return the files in /dev/shm that processes have mapped.

    Files are compared by inode: a named semaphore is mapped under a temporary name that no longer exists.
    """
    path_of: dict[str, Path] = {}
    for entry in os.scandir(_SHARED_MEMORY):
        with suppress(FileNotFoundError):
            path_of[str(entry.stat(follow_symlinks=False).st_ino)] = Path(entry.path)
    mapped: set[Path] = set()
    for pid in processes:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, _, _, _, inode, *name = line.split(maxsplit=5)
                if name and name[0].startswith(f"{_SHARED_MEMORY}/") and inode in path_of:
                    mapped.add(path_of[inode])
    return mapped


def segments_of_torch(process: int) -> set[Path]:
    """Return the files in /dev/shm that torch.multiprocessing has made in a process, found by their names."""
    return set(_SHARED_MEMORY.glob(f"torch_{process}_*"))


def unlink(segments: Iterable[Path]) -> None:
    """Remove shared memory, files and folders. A process keeps what it has mapped until it ends."""
    for segment in segments:
        if segment.is_dir():
            shutil.rmtree(segment, ignore_errors=True)
        else:
            segment.unlink(missing_ok=True)


def kill_group(process_group: int, known: Iterable[Path] = ()) -> None:
    """Kill a process group and remove its shared memory, ``known`` included. The caller may be in it."""
    try:
        unlink({*shared_memory_of(members(process_group)), *known})
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process_group, signal.SIGKILL)
