"""Garbage is looked for seldom, but it is looked for."""

import subprocess
import sys

CYCLES = """
import gc, weakref
from slipstream.rollout.system.garbage import expect_objects, look_seldom_for_garbage

class Node:
    def __init__(self):
        self.itself = self

def live_cycles(number):
    return sum(node() is not None for node in [weakref.ref(Node()) for _ in range(number)])

before = live_cycles(20_000)
look_seldom_for_garbage()
seldom, many = live_cycles(20_000), live_cycles(400_000)
expect_objects(1_000_000)  # each cycle has two, its weak reference included
print(before, seldom, many, live_cycles(400_000), live_cycles(1_000_000))
"""


def test_cycles_are_freed_in_a_process_that_looks_for_them_seldom():
    ended = subprocess.run(
        [sys.executable, "-c", CYCLES], capture_output=True, text=True, timeout=240, check=True
    )
    often, seldom, many, expected, too_many = map(int, ended.stdout.split())
    assert often < seldom == 20_000, "it looks less often"
    assert many < 100_000, "but it does"
    assert expected == 400_000, "not because of objects that it was told of"
    assert too_many < 600_000, "but because of more"
