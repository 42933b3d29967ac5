"""The keeper of a judge. It also writes what the reward prints into a bounded log, and reports how the judge
has ended.

    pool ──lifeline── keeper ◄──SIGCHLD, output, crash── judge ── its children
      └────────────── connection ────────────────────────┘

The report comes over the lifeline. What this module imports is in the memory of both: keep it light.
"""

import os
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress

from slipstream.rollout.reward.judge.output import TAIL, BoundedLog
from slipstream.rollout.system.linux import PR_SET_NAME, prctl
from slipstream.rollout.system.programs.keeper import Keeper

REPORT = struct.Struct("<iII")
"""Wait status of the judge, and the lengths of the two texts that follow: its crash dump, and the end of its
output."""

_LONGEST_CRASH = 1 << 20
"""Bytes of tracebacks that are read. Python stops at a hundred threads by itself."""

_OOM_SCORE = "500"
"""When the machine runs out of memory, the kernel should choose a judge and not its pool."""


def keep(lifeline: int, connection: int, owner: int, scratch: str, log: str) -> None:
    """Run a judge until it ends or ``owner``, the pool's process, does. Returns in the judge as well.

    ``scratch``: folder of the judge's temporary files, which is removed. ``log``: file of its output.
    """
    os.set_inheritable(connection, False)
    keeper = Keeper(lifeline, owner)
    output_reader, output_writer = os.pipe()
    crash_reader, crash_writer = os.pipe()
    if keeper.fork():
        os.close(output_reader)
        os.close(crash_reader)
        _become_judge(output_writer)
        from slipstream.rollout.reward.judge.worker import work

        work(socket.socket(fileno=connection), crash_writer)
        return

    for fd in (connection, output_writer, crash_writer):
        os.close(fd)
    prctl(PR_SET_NAME, b"judge-keeper")
    printed, crash = BoundedLog(log), bytearray()

    def crashed(data: bytes) -> None:
        crash.extend(data[: _LONGEST_CRASH - len(crash)])

    keeper.watch({output_reader: printed.write, crash_reader: crashed}, kill=True)
    printed.close()
    _remove(scratch)
    _report(lifeline, signal.SIGKILL if keeper.status is None else keeper.status, bytes(crash), printed.tail)


def _become_judge(output: int) -> None:
    """Make this process one that can only harm itself."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore  # a crash would lose what is buffered
    prctl(PR_SET_NAME, b"judge")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(_OOM_SCORE)


def _report(lifeline: int, status: int, crash: bytes, tail: bytes) -> None:
    """Send the judge's end to the pool. The lifeline holds the report, so that this does not wait."""
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
