"""Memory of processes that live for days: rare searches for garbage, and few heaps.

Python looks at its young objects whenever a certain number of them, 700 by default, has been made and not
freed, and every tenth time at older ones. Collectors and driver have many objects for each of their
thousands of episodes, nearly all of which end by reference counting. If the episodes have more objects than
this number, Python looks at all of them in vain. That takes up to half of a collector's time, and its event
loop stands still meanwhile: for 20 ms with a thousand episodes, for two seconds with 32,768.

So the number grows with the episodes: garbage has at most as many objects as all episodes have, and LEAST.

glibc's malloc gives threads heaps of their own, up to eight for each core, and a heap keeps what has been
freed in it. Threads of Ray, SQLite, TensorBoard and autograd come and go, so that each heap grows to the
largest need of any of them: on two cores by 100 MB an hour in the driver and in a trainer rank, although
their objects did not grow. Two heaps bound that. Python's lock lets one thread run at a time, so that two
heaps cost nothing that could be measured.
"""

import ctypes
import gc
import os
from collections.abc import Generator
from contextlib import contextmanager

HEAPS = 2
"""Heaps of a process."""

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
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_ARENA_MAX, HEAPS)


def return_free_memory() -> None:
    """Give memory that is free back to the system. glibc alone gives back only what is free at a heap's end.

    It takes milliseconds in which threads that allocate wait, and the interpreter's lock is not held.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


LEAST = 50_000
"""Objects of a process that has no episodes."""

OF_COLLECTED_EPISODE = 100
"""Objects that an episode has in a collector, twice as many as with a plain workflow."""

OF_RECORDED_EPISODE = 10
"""Objects that an episode has in the driver."""


@contextmanager
def kept_for_good() -> Generator[None]:
    """Look for no garbage inside the block, which imports modules, and never look at what it has made.

    Torch, SGLang and Megatron make hundreds of thousands of objects that stay. To look at them again and
    again takes a sixth of the time of such an import, and later most of the time of every search.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def look_seldom_for_garbage(objects: int = 0) -> None:
    """Look less often, and never again at what exists now. Call it when all modules are imported.

    ``objects``: number of objects that all episodes have at one time.
    """
    gc.collect()
    gc.freeze()
    expect_objects(objects)


def expect_objects(objects: int) -> None:
    """Look as often as suits a process whose episodes have so many objects at one time."""
    gc.set_threshold(LEAST + objects, 10, 10)
