"""The size of Ray's object store, shared memory through which batches travel from the driver to the ranks.

Its pages cost nothing before they are used, so it is sized for the largest batch that a recipe allows. What
does not fit goes through files, which is slower.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
CONTROL_GROUP = Path("/sys/fs/cgroup")

MAKE_ROOM = (
    f"Ray, engines and ranks share memory there, and who writes to it when it is full ends by SIGBUS. Remove "
    f"what ended processes have left in it (`ls -l {SHARED_MEMORY}`), or make it larger (mount -o "
    f"remount,size=16g {SHARED_MEMORY}; in Docker --shm-size=16g)"
)
"""What a user can do where shared memory is short."""

SHARED_MEMORY_FULL = (
    f"{SHARED_MEMORY} of the machine on which this happened is full: {MAKE_ROOM}, and go on with --resume"
)
"""What a user is told where shared memory has run out."""

ALMOST_NOTHING = 2**20
"""Free bytes of shared memory at which it is taken for full."""

BYTES_PER_TOKEN = 17
"""Bytes of a token in a batch: id (8), log-prob (4), policy version (4) and loss mask (1)."""
BYTES_PER_TRAJECTORY = 1024
"""Bytes of a trajectory besides its tokens."""

COPIES = 2
"""Batches in the store at a time: Ray frees the one of the last step only some time after it."""
OTHERS = 128 * 2**20
"""Bytes for everything else that goes through the store."""

SHARE_OF_SHARED_MEMORY = 0.8
SHARE_OF_MEMORY = 0.3
"""Largest fraction of the free memory. Ray's own default."""

MINIMUM = 75 * 2**20
"""Bytes of the smallest store that Ray accepts."""


@dataclass(frozen=True)
class ObjectStore:
    """Size and place of the object store of a machine."""

    size: int
    """Bytes."""
    in_shared_memory: bool
    note: str | None = None
    """Message for the user about the object store."""


def batch_bytes(trajectories: int, longest: int) -> int:
    """Return an upper bound of a batch's size. ``longest``: most tokens of a trajectory."""
    return trajectories * (longest * BYTES_PER_TOKEN + BYTES_PER_TRAJECTORY)


def object_store(batch: int, *, shared_memory: int, memory: int) -> ObjectStore:
    """Return the object store for batches of ``batch`` bytes where so many bytes are free."""
    enough = OTHERS + COPIES * batch
    in_memory = int(SHARE_OF_MEMORY * memory)
    in_shared_memory = int(SHARE_OF_SHARED_MEMORY * shared_memory)
    size = min(enough, in_memory, in_shared_memory)
    if size < MINIMUM:
        size, place = max(MINIMUM, min(enough, in_memory)), "is in a file, because"
        return ObjectStore(size, False, _note(size, batch, shared_memory, memory, place))
    if size < min(enough, OTHERS + batch):
        return ObjectStore(size, True, _note(size, batch, shared_memory, memory, "is small, because"))
    return ObjectStore(size, True)


def free_shared_memory() -> int:
    """Return the number of free bytes in /dev/shm; 0 where there is none."""
    if not SHARED_MEMORY.is_dir():
        return 0
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


def is_shared_memory_full() -> bool:
    """Return whether /dev/shm of this machine is full."""
    return free_shared_memory() < ALMOST_NOTHING


def free_memory() -> int:
    """Return the bytes of memory that this process's control group has left, or else the machine."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no control group, or one without a limit ("max")
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        free = min(free, limit - int((CONTROL_GROUP / "memory.current").read_text()))
    return max(free, 0)


def too_small(size: int, batch: int) -> str | None:
    """Return what the user should know when a job's stores of ``size`` bytes cannot hold a batch."""
    if size >= OTHERS + batch:
        return None
    return (
        f"Ray's object store has {_mib(size)} on a node of this job, and a batch may take {_mib(batch)}: "
        "what does not fit goes through files, which is slower; submit the job with a larger "
        "SLIPSTREAM_OBJECT_STORE (bytes)"
    )


def _note(size: int, batch: int, shared_memory: int, memory: int, place: str) -> str:
    return (
        f"Ray's object store of {_mib(size)} {place} {_mib(shared_memory)} of {SHARED_MEMORY} and "
        f"{_mib(memory)} of memory are free, and a batch may take {_mib(batch)}: what does not fit goes "
        f"through files, which is slower; make {SHARED_MEMORY} larger (in Docker: --shm-size) or the batch "
        "smaller"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
