"""Ends a collector in which a workflow blocks the event loop, and says which one.

Workflows share the collector's loop. One that sleeps or computes without awaiting holds up all others, and no
time limit of asyncio can end it. A thread notices when the loop stands still, reports the group whose code
runs with its traceback, and ends the process: the driver gives its groups to others. Code that does not even
let threads run is ended by a timer in C, which writes the traceback to the log.
"""

import asyncio
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from slipstream.rollout.collection.collector.groups import TASK_NAME

BLOCKED = 70
"""Exit code of a collector that ended itself."""

PATIENCE = 1.5
"""Time limits after which the timer in C ends a process whose threads do not run."""

Report = Callable[[int | None, str], None]
"""Tells the driver: number of the group, if it is known, and the traceback. Runs in the watchdog's thread."""


@contextmanager
def watched(limit_s: float, report: Report) -> Iterator[None]:
    """End the process when the running loop stands still for ``limit_s`` seconds inside the block."""
    loop = asyncio.get_running_loop()
    watchdog = _Watchdog(loop, limit_s, report)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


class _Watchdog:
    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float, report: Report) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._report = report
        self._loop_thread = threading.get_ident()
        self._beaten = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
        self._beaten.set()
        self._thread.join()

    def _beat(self) -> None:
        """Show that the loop runs, again and again."""
        self._beaten.set()
        faulthandler.dump_traceback_later(PATIENCE * self._limit_s, exit=True)
        self._timer = self._loop.call_later(self._limit_s / 4, self._beat)

    def _watch(self) -> None:
        while not self._ended:
            # A process that was suspended as a whole gets a second chance.
            if not self._beaten.wait(self._limit_s) and not self._beaten.wait(self._limit_s / 4):
                self._bite()
            self._beaten.clear()

    def _bite(self) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        stack = "".join(traceback.format_stack(frame)) if frame else "no traceback"
        task = asyncio.current_task(self._loop)
        name = task.get_name() if task is not None else ""
        group = int(name.removeprefix(TASK_NAME)) if name.startswith(TASK_NAME) else None
        reason = f"the event loop has stood still for {self._limit_s:g} s in {name or 'no task'}"
        end_process(self._report, group, stack, reason)


def end_process(report: Report, group: int | None, stack: str, reason: str = "") -> NoReturn:
    """End this process, whose user code cannot be ended otherwise, after the driver has heard why."""
    print(f"{reason}:\n{stack}" if reason else stack, file=sys.stderr, flush=True)
    try:
        report(group, stack)
    finally:
        os._exit(BLOCKED)
