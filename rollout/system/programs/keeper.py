"""The process around one in which code of others runs. It ends everything that this one has started.

    owner ──lifeline── keeper ◄──SIGCHLD, pipes── kept process ── its children

No such code runs here, so that a keeper always answers. It adopts the orphans of the kept process and its
children, and ends them all when

- the kept process ends, for whatever reason;
- the lifeline ends, because the owner closes it or dies (kill -9 included).

The kept process is a fork of the keeper and dies with it. Keep the imports light: they are in the memory of
both, and there is a keeper for each program.
"""

import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module

from slipstream.rollout.system.bounded_log import TAIL, BoundedLog
from slipstream.rollout.system.linux import (
    PR_SET_NAME,
    PR_SET_PDEATHSIG,
    adopt_orphans,
    children_of,
    ended_children,
    has_children,
    prctl,
)

NOT_STARTED = 127
"""Exit code of a program that cannot be started, as shells have it."""

REPORT = struct.Struct("<iII")
"""Wait status of the kept process, and the lengths of the two texts that follow: its crash dump, and the end
of its output."""

_ENDINGS = ((signal.SIGTERM, 0.5), (signal.SIGKILL, 5.0))
"""Signals to the processes that are left, and the seconds to wait for their effect. Python's resource tracker
ignores SIGTERM, and removes the shared memory of a killed process within the first."""

_LONGEST_WAIT_S = 0.1
"""Time between two looks at the processes that are to end: one of them may have started another one."""

_LONGEST_CRASH = 1 << 20
"""Bytes of tracebacks that are read. Python stops at a hundred threads by itself."""

_OOM_SCORE = "500"
"""When the machine runs out of memory, the kernel should choose a kept process and not its owner."""

_MOST_READ = 1 << 16
_MOST_READS = 64
"""Reads of what is left in the pipes at the end. One that is still written to is not read for ever."""


def begin_to_keep() -> tuple[int, int]:
    """Make this process a keeper. Return the ends of a pipe that wakes it: a child or its owner has ended."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _only_wake)
    # The kernel sends SIGTERM when the thread ends that has started this process. Only if its process has
    # ended too is the owner gone.
    signal.signal(signal.SIGTERM, _only_wake)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    adopt_orphans()
    return reader, writer


class Keeper:
    """The only loop of a keeper: everything that happens to the kept process, in its order."""

    def __init__(self, lifeline: int, owner: int) -> None:
        """``owner``: process at the other end of ``lifeline``, over which it never sends anything."""
        os.set_inheritable(lifeline, False)
        self._lifeline = lifeline
        self._owner = owner
        self._wakeup, self._wakeup_writer = begin_to_keep()
        self._kept = 0
        self._owner_has_gone = False
        self._readers: Mapping[int, Callable[[bytes], None]] = {}
        self._poll = select.poll()
        self.status: int | None = None
        """Wait status of the kept process; None: it has not ended."""

    def fork(self) -> bool:
        """Fork. Return True in the kept process, which dies with the keeper and has a session of its own."""
        keeper = os.getpid()
        self._kept = os.fork()
        if self._kept:
            return False
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it ended before the line above
            os._exit(1)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for fd in (self._lifeline, self._wakeup, self._wakeup_writer):
            os.close(fd)
        return True

    def watch(self, readers: Mapping[int, Callable[[bytes], None]], *, kill: bool) -> None:
        """Wait until the kept process ends or its owner has gone, and end all that is left then.

        ``readers``: what takes the bytes of each pipe. ``kill``: the kept process gets no time to end.
        """
        self._readers = readers
        for fd in (self._lifeline, self._wakeup, *readers):
            self._poll.register(fd, select.POLLIN)
        while self.status is None and not self._owner_has_gone:
            self._handle_events(None)
        if kill and self.status is None:
            os.kill(self._kept, signal.SIGKILL)
        self._end_children()
        for _ in range(_MOST_READS):
            if not self._handle_events(0):
                break

    def _end_children(self) -> None:
        for number, seconds in _ENDINGS:
            deadline = time.monotonic() + seconds
            while has_children() and (left := deadline - time.monotonic()) > 0:
                for child in children_of(os.getpid()):
                    with suppress(ProcessLookupError):
                        os.kill(child, number)
                self._handle_events(min(left, _LONGEST_WAIT_S))

    def _handle_events(self, seconds: float | None) -> bool:
        """Wait for something to happen and handle it. Return True if anything has."""
        events = self._poll.poll(None if seconds is None else seconds * 1000)
        for fd, _ in events:
            if fd in self._readers:
                if data := os.read(fd, _MOST_READ):
                    self._readers[fd](data)
                else:
                    self._poll.unregister(fd)
            elif fd == self._wakeup:
                os.read(fd, _MOST_READ)
                self._reap()
                self._owner_has_gone = self._owner_has_gone or os.getppid() != self._owner
            else:  # nothing is ever sent over the lifeline: this is its end
                self._poll.unregister(fd)
                self._owner_has_gone = True
        return bool(events)

    def _reap(self) -> None:
        for pid, status in ended_children():
            if pid == self._kept:
                self.status = status


def keep(lifeline: int, owner: int, command: Sequence[str]) -> int:
    """Run a program until it ends or its owner does. Return its exit code: 128 + N if a signal N ended it."""
    keeper = Keeper(lifeline, owner)
    if keeper.fork():
        _become(command)
    prctl(PR_SET_NAME, b"program-keeper")
    keeper.watch({}, kill=False)
    code = NOT_STARTED if keeper.status is None else os.waitstatus_to_exitcode(keeper.status)
    return code if code >= 0 else 128 - code


def _become(command: Sequence[str]) -> None:
    """Turn this process into a program."""
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvp(command[0], list(command))
    except BaseException as error:
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode(errors="replace"))
    finally:
        os._exit(NOT_STARTED)


def keep_function(
    lifeline: int, connection: int, owner: int, path: str, name: str, scratch: str, log: str
) -> None:
    """Call a function of ours until it ends or its owner does, and report how. Returns in the fork as well.

    ``path``: import path of the function, which gets the socket ``connection`` and a descriptor for the
    tracebacks of a process that is about to die. ``name``: of the process. ``scratch``: folder of its
    temporary files, which is removed. ``log``: file of what it prints, whose size is bounded.
    """
    os.set_inheritable(connection, False)
    keeper = Keeper(lifeline, owner)
    output_reader, output_writer = os.pipe()
    crash_reader, crash_writer = os.pipe()
    if keeper.fork():
        os.close(output_reader)
        os.close(crash_reader)
        _become_harmless(output_writer, name)
        module, _, function = path.rpartition(".")
        getattr(import_module(module), function)(socket.socket(fileno=connection), crash_writer)
        return

    for fd in (connection, output_writer, crash_writer):
        os.close(fd)
    prctl(PR_SET_NAME, f"{name}-keeper".encode())
    printed, crash = BoundedLog(log), bytearray()

    def crashed(data: bytes) -> None:
        crash.extend(data[: _LONGEST_CRASH - len(crash)])

    keeper.watch({output_reader: printed.write, crash_reader: crashed}, kill=True)
    printed.close()
    _remove(scratch)
    _report(lifeline, signal.SIGKILL if keeper.status is None else keeper.status, bytes(crash), printed.tail)


def _become_harmless(output: int, name: str) -> None:
    """Make this process one that can only harm itself."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore  # a crash would lose what is buffered
    prctl(PR_SET_NAME, name.encode())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(_OOM_SCORE)


def _report(lifeline: int, status: int, crash: bytes, tail: bytes) -> None:
    """Say how the kept process has ended. The lifeline holds the report, so that this does not wait."""
    if len(crash) > TAIL:  # its first line says what has happened, and the main thread comes last
        crash = b"%b\n...\n%b" % (crash[: TAIL // 8], crash[-TAIL // 2 :])
    with suppress(OSError), socket.socket(fileno=lifeline) as connection:
        connection.send(REPORT.pack(status, len(crash), len(tail)) + crash + tail, socket.MSG_DONTWAIT)


def _remove(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def _only_wake(number: int, frame: object) -> None:
    """Handle a signal by nothing: its arrival ends the wait of the loop."""
