"""Ends what a run started on this machine when the run itself can no longer do it (kill -9 included).

    python -m slipstream.backend.cluster.guard MARK FOLDER

Every process of a run inherits the environment variable SLIPSTREAM_RUN=MARK. Standard input is a pipe from
the run; at its end the guard kills whatever still carries the mark, or has a file below FOLDER open (Ray's
agents wipe their environment when they set their title), and removes FOLDER and the temporary folders of the
killed. After an orderly end there is nothing left to kill.
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

from slipstream.backend.cluster.object_store import SHARED_MEMORY
from slipstream.rollout.engine.leftovers import shared_memory_of, unlink
from slipstream.rollout.system.temporary import sweep

VARIABLE = "SLIPSTREAM_RUN"
SWEEPS = 50
"""Number of rounds of killing: a process may be born while its parent is being killed."""
END_S = 10.0
"""Longest time in which processes that were killed must have ended: freeing their memory takes a while."""

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


def main() -> None:
    mark, folder = sys.argv[1], Path(sys.argv[2])
    spared = {os.getpid(), os.getppid()}  # the run itself may be waiting for this to end
    while os.read(0, 1):
        """Nothing is ever sent: the read returns at end of file."""
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
