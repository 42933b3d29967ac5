"""Lets processes of this machine show where they stand, also those that hang in C.

    SIGUSR1 ──► a handler in C writes the stacks of all threads into memory ──► /proc ──► a file, by who asks

The handler runs while Python does not, as in a collective, and waits for no disk. A process that is stopped
writes nothing, and is named.
"""

import faulthandler
import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from slipstream.rollout.system.disk import describe

FOLDER = "stacks"
"""Folder in that of the logs."""

MEMORY = "slipstream-stacks"
"""Name of the memory that a process writes its stacks into, among its open files in /proc."""

WRITE_S = 5.0
"""Longest wait for all processes that are asked together. The handler takes some milliseconds."""

POLL_S = 0.02
"""Seconds between two looks at what they write: no event tells of another process's writing."""

QUIET_POLLS = 5
"""Number of looks without anything new after which nothing more is expected."""

_STOPPED = {"T": "is stopped by a signal", "t": "is stopped by a debugger", "Z": "has ended"}
_SILENT = {"D": "waits for a device"}

_memory = -1
"""Descriptor of this process's memory."""


def shows_stacks() -> None:
    """Let this process, and each that it forks in Python, show its stacks when it gets SIGUSR1."""
    _show()
    os.register_at_fork(after_in_child=_show)


def _show() -> None:
    global _memory
    memory, earlier = os.memfd_create(MEMORY, os.MFD_CLOEXEC), _memory
    faulthandler.register(signal.SIGUSR1, memory, all_threads=True)
    _memory = memory
    if earlier >= 0:
        os.close(earlier)  # that of the parent


def write_stacks(asked: Mapping[int, tuple[str, Path]]) -> dict[int, str]:
    """Let processes that ``shows_stacks`` append them to files, all at once, within ``WRITE_S``.

    ``asked``: by the id of each process a name, which stands above its stacks, and the file. Return, by the
    id, why there are no stacks of a process. Raises nothing.
    """
    silent: dict[int, str] = {}
    with ExitStack() as opened:
        memories: dict[int, BinaryIO] = {}
        for pid in asked:
            if (state := _state(pid)) in _STOPPED:
                silent[pid] = _STOPPED[state]
                continue
            try:
                memories[pid] = memory = opened.enter_context(_memory_of(pid))
                memory.seek(0, os.SEEK_END)
                os.kill(pid, signal.SIGUSR1)
            except OSError:
                silent[pid] = "has ended"
                memories.pop(pid, None)
        _wait(memories.values())
        for pid, memory in memories.items():
            if (why := _append(pid, memory.read(), *asked[pid])) is not None:
                silent[pid] = why
    return silent


def _wait(memories: Collection[BinaryIO]) -> None:
    """Wait until something new is in each memory, and nothing more comes."""
    before = [memory.tell() for memory in memories]
    sizes, quiet = before, 0
    deadline = time.monotonic() + WRITE_S
    while time.monotonic() < deadline:
        if quiet >= QUIET_POLLS and all(new > old for new, old in zip(sizes, before, strict=True)):
            return
        time.sleep(POLL_S)
        earlier, sizes = sizes, [os.fstat(memory.fileno()).st_size for memory in memories]
        quiet = quiet + 1 if sizes == earlier else 0


def _append(pid: int, stacks: bytes, name: str, path: Path) -> str | None:
    """Append stacks to a file. Return why there are none; None: there are some."""
    if not stacks:
        return (_STOPPED | _SILENT).get(_state(pid), "does not react to a signal")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(f"{time.strftime('%F %T')}: {name} (process {pid})\n".encode() + stacks)
    except OSError as error:
        return f"has stacks that cannot be written: {describe(error)}"
    return None


def showing(pids: Iterable[int]) -> list[int]:
    """Return the processes that show their stacks. The signal ends any other one."""
    found: list[int] = []
    for pid in pids:
        with suppress(OSError), _memory_of(pid):  # processes come and go
            found.append(pid)
    return found


def _memory_of(pid: int) -> BinaryIO:
    """Open the memory of a process that has a handler for SIGUSR1. Raises OSError if there is none."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:") and int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1:
            break
    else:
        raise ProcessLookupError(f"process {pid} has no handler")
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if os.readlink(file).startswith(f"/memfd:{MEMORY}"):
                return file.open("rb")
    raise ProcessLookupError(f"process {pid} does not show its stacks")


def _state(pid: int) -> str:
    """Return Linux's letter for what a process does; that of a zombie if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"
