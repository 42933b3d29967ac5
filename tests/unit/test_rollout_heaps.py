"""A process with many threads has few heaps."""

import os
import subprocess
import sys

HEAPS = """
import ctypes, os, sys, threading
from slipstream.rollout.system.garbage import keep_few_heaps

if sys.argv[1] == "child of few":
    keep_few_heaps()
    os.execv(sys.executable, [sys.executable, "-c", sys.orig_argv[2], "many"])
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]

if sys.argv[1] == "few":
    keep_few_heaps()
together = threading.Barrier(12)

def work():
    together.wait()
    block = libc.malloc(50_000)
    together.wait()
    libc.free(block)

threads = [threading.Thread(target=work) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
out = libc.fdopen(1, b"w")
libc.malloc_info(0, out)
libc.fflush(out)
"""


def heaps(setting: str) -> int:
    ended = subprocess.run(
        [sys.executable, "-c", HEAPS, setting],
        env={name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return ended.stdout.count("<heap nr=")


def test_threads_share_two_heaps():
    assert heaps("few") <= 2 < heaps("many")
    assert heaps("child of few") <= 2


def test_a_ranks_largest_batch_does_not_decide_what_it_holds_from_then_on():
    """Blocks below the threshold of mmap are freed between others that stay: glibc alone keeps the holes."""
    program = """
from types import SimpleNamespace
from slipstream.backend.cluster.trainer_actor import TrainerActor

def held():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

class Rank:
    def train(self):
        blocks = [b"x" * 60_000 + bytes([i % 256]) for i in range(4000)]
        self.kept = blocks[::100]

actor, before = SimpleNamespace(_instance=Rank()), held()
TrainerActor.call(actor, "train")
print(held() - before)
"""
    grown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(grown.stdout) < 60
