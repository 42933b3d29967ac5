"""Ends what a run started on this machine when the run itself can no longer do it (kill -9 included).

    python -m slipstream.backend.cluster.guard MARK FOLDER

Every process of a run inherits the environment variable SLIPSTREAM_RUN=MARK. Standard input is a pipe from
the run; at its end the guard kills whatever still carries the mark, or has a file below FOLDER open (Ray's
agents wipe their environment when they set their title), and removes FOLDER and the temporary folders of the
killed. After an orderly end there is nothing left to kill.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from slipstream.backend.cluster.object_store import SHARED_MEMORY
from slipstream.rollout.engine.leftovers import shared_memory_of, unlink
from slipstream.rollout.temporary import sweep

VARIABLE = "SLIPSTREAM_RUN"
SWEEPS = 50
"""Number of rounds of killing: a process may be born while its parent is being killed."""


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


def main() -> None:
    mark, folder = sys.argv[1], Path(sys.argv[2])
    spared = {os.getpid(), os.getppid()}  # the run itself may be waiting for this to end
    while os.read(0, 1):
        """Nothing is ever sent: the read returns at end of file."""
    for _ in range(SWEEPS):
        left = carriers(mark, folder, spared)
        unlink(shared_memory_of(left))
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
    shutil.rmtree(folder, ignore_errors=True)
    for parent in {folder.parent, Path(tempfile.gettempdir()), SHARED_MEMORY}:
        sweep(parent)  # folders of servers and judges whose owners were just killed


if __name__ == "__main__":
    main()
