"""Removes shared memory and files of processes that SIGKILL has given no time to clean up."""

import os
import shutil
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
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


def announced(folder: Path) -> set[Path]:
    """Return the files in /dev/shm to which links in ``folder`` lead.

    A server leaves these links for files that no process may have mapped when it is ended.
    """
    files: set[Path] = set()
    with suppress(FileNotFoundError):
        for entry in folder.iterdir():
            if entry.is_symlink() and (target := entry.readlink()).parent == _SHARED_MEMORY:
                files.add(target)
    return files


@dataclass(frozen=True)
class ProcessIdentity:
    """Tells a process from every other one, on any machine and at any time: ids are used again."""

    machine: str
    """Boot of the kernel and namespace in which ``pid`` is counted."""
    pid: int
    started: int
    """Start of the process, in clock ticks since the boot."""


def this_process() -> ProcessIdentity:
    """Return the identity of the calling process."""
    started = _start_of(os.getpid())
    assert started is not None
    return ProcessIdentity(_machine(), os.getpid(), started)


def process_of(pid: int) -> ProcessIdentity | None:
    """Return the identity of a process of this machine; None if there is none."""
    started = _start_of(pid)
    return None if started is None else ProcessIdentity(_machine(), pid, started)


def segments_of_torch(process: ProcessIdentity) -> set[Path]:
    """Return the files in /dev/shm that torch.multiprocessing has made in a process of this machine.

    They are known by the process's id in their names. There are none when the process is of another machine,
    or when another one has its id now. There, torch's own manager removes them, two seconds after the end of
    the process.
    """
    if process.machine != _machine() or _start_of(process.pid) not in (None, process.started):
        return set()
    files: set[Path] = set()
    for path in _SHARED_MEMORY.glob(f"torch_{process.pid}_*"):
        with suppress(FileNotFoundError):
            if path.stat().st_uid == os.geteuid():
                files.add(path)
    return files


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _start_of(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; None if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


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
