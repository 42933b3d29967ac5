"""Harm done to the processes of a loop: slowed, stopped or killed, for a time."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

KINDS = ("slowed", "stopped", "killed")

PERIOD_S = 0.1
"""Time from one stop of a slowed process to the next."""
RUNNING = 0.1
"""Share of a period in which a slowed process runs: it takes ten times as long for everything."""
LOOK_S = 1.0
"""Time between two looks for processes that have been started again, which are slowed as well."""

Find = Callable[[], list[psutil.Process]]


@contextmanager
def disturbed(kind: str, find: Find) -> Iterator[None]:
    """Harm the processes that ``find`` returns, until the end of the block."""
    if kind == "killed":
        _send(find(), signal.SIGKILL)
        yield
        return
    with stopped(find()) if kind == "stopped" else slowed(find):
        yield


@contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    """Stop processes until the end of the block."""
    try:
        _send(processes, signal.SIGSTOP)
        yield
    finally:
        _send(processes, signal.SIGCONT)


@contextmanager
def slowed(find: Find) -> Iterator[None]:
    """Let processes run for a share RUNNING of the time only, until the end of the block."""
    ended = threading.Event()
    slowing = threading.Thread(target=_slow, args=(find, ended), name="slowing")
    slowing.start()
    try:
        yield
    finally:
        ended.set()
        slowing.join()


def _slow(find: Find, ended: threading.Event) -> None:
    processes, looked_s = find(), time.monotonic()
    try:
        while not ended.is_set():
            if time.monotonic() - looked_s > LOOK_S:
                processes, looked_s = find(), time.monotonic()
            _send(processes, signal.SIGSTOP)
            ended.wait(PERIOD_S * (1 - RUNNING))
            _send(processes, signal.SIGCONT)
            ended.wait(PERIOD_S * RUNNING)
    finally:
        _send(processes, signal.SIGCONT)


def _send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
