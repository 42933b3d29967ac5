"""The outer process of a judge. It outlives the reward, and ends everything that the reward has started.

    pool ──lifeline── keeper ◄──SIGCHLD, output, crash── judge ── its children
      └────────────── connection ────────────────────────┘

No user code runs here, so that it always answers. It adopts what the judge's processes leave behind (it is
their subreaper), writes what they print into a bounded log, and ends them all when

- the judge ends, for whatever reason: then it reports how, over the lifeline;
- the lifeline ends, because the pool closes it or dies (kill -9 included).

The judge is a fork of the keeper and dies with it. What this module imports is in the memory of both: keep it
light.
"""

import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress

from slipstream.rollout.reward.judge.output import TAIL, BoundedLog
from slipstream.rollout.system.linux import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NAME,
    PR_SET_PDEATHSIG,
    children_of,
    ended_children,
    has_children,
    prctl,
)

REPORT = struct.Struct("<iII")
"""Wait status of the judge, and the lengths of the two texts that follow: its crash dump, and the end of its
output."""

_ENDINGS = ((signal.SIGTERM, 0.5), (signal.SIGKILL, 5.0))
"""Signals to the processes that a judge leaves behind, and the seconds to wait for their effect. Python's
resource tracker ignores SIGTERM, and removes the shared memory of a killed judge within the first."""

_MOST_READ = 1 << 16
_MOST_READS = 64
"""Reads of what is left in the pipes behind the end. One that is still written to is not read for ever."""

_LONGEST_CRASH = 1 << 20
"""Bytes of tracebacks that are read. Python stops at a hundred threads by itself."""

_OOM_SCORE = "500"
"""When the machine runs out of memory, the kernel should choose a judge and not its pool."""


def keep(lifeline_fd: int, connection_fd: int, owner: int, scratch: str, log: str) -> None:
    """Run a judge until it ends or ``owner``, the pool's process, does. Returns in the judge as well.

    ``scratch``: folder of the judge's temporary files, which is removed. ``log``: file of its output.
    """
    os.set_inheritable(connection_fd, False)
    lifeline = socket.socket(fileno=lifeline_fd)
    lifeline.set_inheritable(False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    wakeup_reader, wakeup_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _only_wake)
    # The kernel sends SIGTERM when the thread ends that has started this process. Only if its process has
    # ended too is the judge ended.
    signal.signal(signal.SIGTERM, _only_wake)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    output_reader, output_writer = os.pipe()
    crash_reader, crash_writer = os.pipe()

    keeper = os.getpid()
    judge = os.fork()
    if judge == 0:
        _become_judge(keeper, output_writer)
        for fd in (output_reader, crash_reader, wakeup_reader, wakeup_writer):
            os.close(fd)
        lifeline.close()
        from slipstream.rollout.reward.judge.worker import work

        work(socket.socket(fileno=connection_fd), crash_writer)
        return

    for fd in (connection_fd, output_writer, crash_writer):
        os.close(fd)
    prctl(PR_SET_NAME, b"judge-keeper")
    watch = _Watch(judge, owner, lifeline, wakeup_reader, output_reader, crash_reader, BoundedLog(log))
    status = watch.until_the_end()
    watch.end_children()
    _remove(scratch)
    watch.report(status)


def _become_judge(keeper: int, output: int) -> None:
    """Turn this fork of the keeper into a process of its own that can only harm itself."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:  # it ended before the line above
        os._exit(1)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore  # a crash would lose what is buffered
    prctl(PR_SET_NAME, b"judge")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(_OOM_SCORE)


class _Watch:
    """The keeper's only loop: everything that happens to the judge, in the order in which it happens."""

    def __init__(
        self,
        judge: int,
        owner: int,
        lifeline: socket.socket,
        wakeup: int,
        output: int,
        crash: int,
        log: BoundedLog,
    ) -> None:
        self._judge = judge
        self._owner = owner
        self._lifeline = lifeline
        self._wakeup = wakeup
        self._output = output
        self._crash = crash
        self._log = log
        self._crash_text = b""
        self._status: int | None = None
        self._poll = select.poll()
        for fd in (lifeline.fileno(), wakeup, output, crash):
            self._poll.register(fd, select.POLLIN)

    def until_the_end(self) -> int:
        """Return the wait status of the judge. Kills it when its pool has gone."""
        while self._status is None:
            self._handle_events(None)
        return self._status

    def end_children(self) -> None:
        """End every process that the judge has left behind, and read what was still in the pipes."""
        for end, seconds in _ENDINGS:
            deadline = time.monotonic() + seconds
            while has_children() and (left := deadline - time.monotonic()) > 0:
                for child in children_of(os.getpid()):
                    with suppress(ProcessLookupError):
                        os.kill(child, end)
                self._handle_events(left)
        for _ in range(_MOST_READS):
            if not self._handle_events(0):
                break
        self._log.close()

    def report(self, status: int) -> None:
        """Send the judge's end to the pool. The lifeline holds the report, so that this does not wait."""
        crash, tail = self._crash_text, self._log.tail
        if len(crash) > TAIL:  # its first line says what has happened, and the main thread comes last
            crash = b"%b\n...\n%b" % (crash[: TAIL // 8], crash[-TAIL // 2 :])
        with suppress(OSError):
            self._lifeline.send(
                REPORT.pack(status, len(crash), len(tail)) + crash + tail, socket.MSG_DONTWAIT
            )

    def _handle_events(self, seconds: float | None) -> bool:
        """Wait for something to happen and handle it. Return True if anything has."""
        events = self._poll.poll(None if seconds is None else seconds * 1000)
        for fd, _ in events:
            if fd == self._output:
                self._log.write(self._read(fd))
            elif fd == self._crash:
                self._crash_text = (self._crash_text + self._read(fd))[:_LONGEST_CRASH]
            elif fd == self._wakeup:
                os.read(fd, _MOST_READ)
                self._reap()
                if os.getppid() != self._owner:
                    self._kill_judge()
            else:  # nothing is ever sent over the lifeline: this is its end
                self._poll.unregister(fd)
                self._kill_judge()
        return bool(events)

    def _read(self, fd: int) -> bytes:
        data = os.read(fd, _MOST_READ)
        if not data:
            self._poll.unregister(fd)
        return data

    def _reap(self) -> None:
        for pid, status in ended_children():
            if pid == self._judge:
                self._status = status

    def _kill_judge(self) -> None:
        if self._status is None:
            os.kill(self._judge, signal.SIGKILL)


def _remove(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def _only_wake(number: int, frame: object) -> None:
    """Handle a signal by nothing: its arrival ends the wait of the loop."""
