"""Ends what a run started on this machine when the run itself can no longer do it (kill -9 included).

    python -m slipstream.backend.cluster.guard MARK FOLDER

Every process of a run inherits the environment variable SLIPSTREAM_RUN=MARK. Standard input is a pipe from
the run; at its end the guard kills whatever still carries the mark, or has a file below FOLDER open (Ray's
agents wipe their environment when they set their title), and removes FOLDER and the temporary folders of the
killed. After an orderly end, of which a byte on the pipe tells, there is nothing left to kill. After any
other the guard says on standard error what it can find out: Ray ends a process without a word when the
raylet beside it is gone.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from slipstream.backend.cluster.object_store import SHARED_MEMORY, SHARED_MEMORY_FULL, is_shared_memory_full
from slipstream.rollout.engine.leftovers import shared_memory_of, unlink
from slipstream.rollout.system.temporary import sweep

VARIABLE = "SLIPSTREAM_RUN"
SWEEPS = 50
"""Number of rounds of killing: a process may be born while its parent is being killed."""
END_S = 10.0
"""Longest time in which processes that were killed must have ended: freeing their memory takes a while."""

_SIGBUS = b"SIGBUS"
_EXITING = 0x4
"""PF_EXITING of linux/sched.h."""


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Mark this process and its future children, and keep a guard while the context lasts."""
    mark = uuid4().hex
    os.environ[VARIABLE] = mark
    guard = subprocess.Popen(
        [sys.executable, "-m", "slipstream.backend.cluster.guard", mark, str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the run
    )
    assert guard.stdin is not None
    try:
        yield
    finally:
        with suppress(BrokenPipeError):  # somebody has killed the guard
            guard.stdin.write(b".")
            guard.stdin.close()
        guard.wait(60)
        os.environ.pop(VARIABLE, None)


def carriers(mark: str, folder: Path, spared: set[int]) -> list[int]:
    """Return the processes that carry the mark or have a file below ``folder`` open, without ``spared``."""
    variable = f"{VARIABLE}={mark}".encode()
    pids: list[int] = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # processes come and go
            marked = variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if pid not in spared and (marked or _has_open(pid, folder)):
                pids.append(pid)
    return pids


def _has_open(pid: int, folder: Path) -> bool:
    descriptors = Path(f"/proc/{pid}/fd")
    return any(os.readlink(descriptor).startswith(f"{folder}/") for descriptor in descriptors.iterdir())


def _exiting() -> list[int]:
    """Return the processes that have begun to end, and have not yet given back everything."""
    pids: list[int] = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it has ended
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            if int(fields[5]) & _EXITING and state != "Z":
                pids.append(pid)
    return pids


def _wait_for(pids: Iterable[int], number: signal.Signals | None = None) -> None:
    """Send a signal, if there is one, and wait until the processes have ended, for END_S at most."""
    waits: set[int] = set()
    poll, deadline = select.poll(), time.monotonic() + END_S
    for pid in pids:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            poll.register(descriptor, select.POLLIN)
            waits.add(descriptor)
            if number is not None:
                with suppress(PermissionError):
                    signal.pidfd_send_signal(descriptor, number)
    while waits and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(left * 1000):
            poll.unregister(descriptor)
            waits.remove(descriptor)
            os.close(descriptor)


def cause_of_end(folder: Path) -> str:
    """Return why the run's process has probably ended. ``folder``: the one with Ray's."""
    logs = sorted(folder.glob("r/session_2*/logs/*.err")) + sorted(
        folder.glob("r/session_2*/logs/raylet.out")
    )
    by_bus = any(_SIGBUS in _tail(log) for log in logs)
    if by_bus or is_shared_memory_full():
        return f"failed: Ray has ended the run's process without a message. {SHARED_MEMORY_FULL}"
    return (
        "failed: the run's process has ended without a message: it was killed (kill -9, or the kernel for "
        "want of memory: `dmesg` says so), or Ray's processes beside it were; --resume goes on with the run"
    )


def _tail(log: Path) -> bytes:
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2**16))
        return file.read()
    return b""


def main() -> None:
    mark, folder = sys.argv[1], Path(sys.argv[2])
    spared = {os.getpid(), os.getppid()}  # the run itself may be waiting for this to end
    is_orderly = False
    while os.read(0, 1):
        is_orderly = True
    if not is_orderly:
        print(cause_of_end(folder), file=sys.stderr, flush=True)
    for _ in range(SWEEPS):
        left = carriers(mark, folder, spared)
        unlink(shared_memory_of(left))
        _wait_for(left, signal.SIGKILL)
        if not left:
            break
    # A process that is about to end has no environment any more, and still holds the locks of its folders.
    _wait_for(_exiting())
    shutil.rmtree(folder, ignore_errors=True)
    for parent in {folder.parent, Path(tempfile.gettempdir()), SHARED_MEMORY}:
        sweep(parent)  # folders of servers and judges whose owners were just killed


if __name__ == "__main__":
    main()
