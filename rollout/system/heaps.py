"""Heaps of glibc's malloc in processes that live for days and have many threads, which must be few.

malloc gives threads heaps of their own, up to eight for each core, and a heap keeps what has been freed in
it. Threads of Ray, SQLite, TensorBoard and autograd come and go, so that each heap grows to the largest need
of any of them: on two cores by 100 MB an hour in the driver and in a trainer rank, although their objects did
not grow. Two heaps bound that. Beside Python's lock, which lets one thread run at a time, they cost nothing
that could be measured.
"""

import ctypes
import os
from ctypes.util import find_library

HEAPS = 2

VARIABLE = "MALLOC_ARENA_MAX"
"""glibc reads it when a process starts. In a Slurm job slurm/ray_node.sh sets it for Ray's processes."""

_M_ARENA_MAX = -8
"""From malloc.h of glibc."""


def keep_few_heaps() -> None:
    """Let this process and those that it starts have HEAPS heaps at most, or as many as VARIABLE says.

    Call it before threads are started: heaps stay. Other C libraries have no such heaps.
    """
    if VARIABLE in os.environ:
        return
    os.environ[VARIABLE] = str(HEAPS)
    libc = ctypes.CDLL(find_library("c"))
    if hasattr(libc, "mallopt") and hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_ARENA_MAX, HEAPS)
