"""The process around a program. It ends everything that the program has started.

It adopts what the program's processes leave behind, and ends them all when the program ends, or when the
lifeline does: because whoever runs the program closes it, or dies (kill -9 included). Its exit code is the
program's; 128 + N where a signal N has ended that one. Keep the imports light: there is one for each program.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from slipstream.rollout.system.linux import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NAME,
    PR_SET_PDEATHSIG,
    children_of,
    ended_children,
    has_children,
    prctl,
)

NOT_STARTED = 127
"""Exit code of a program that cannot be started, as shells have it."""

_ENDINGS = ((signal.SIGTERM, 0.5), (signal.SIGKILL, 5.0))
"""Signals to the processes of a program, and the seconds to wait for their effect."""


def keep(lifeline: int, command: Sequence[str]) -> int:
    """Run a program until it ends or the lifeline does. Return its exit code."""
    os.set_inheritable(lifeline, False)
    wakeup, wakeup_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _only_wake)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    keeper = os.getpid()
    program = os.fork()
    if program == 0:
        _become(keeper, command)
    prctl(PR_SET_NAME, b"program-keeper")
    poll = select.poll()
    for fd in (lifeline, wakeup):
        poll.register(fd, select.POLLIN)
    code: int | None = None
    while code is None:
        ready = [fd for fd, _ in poll.poll()]
        code = _reap(program)
        if lifeline in ready:  # nothing is ever sent over it: this is its end
            break
        with suppress(BlockingIOError):
            os.read(wakeup, 4096)
    ended = _end_all(program, wakeup)
    return next((each for each in (code, ended) if each is not None), NOT_STARTED)


def _become(keeper: int, command: Sequence[str]) -> None:
    """Turn this fork of the keeper into the program."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it ended before the line above
            os._exit(1)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], list(command))
    except BaseException as error:
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode(errors="replace"))
    finally:
        os._exit(NOT_STARTED)


def _reap(program: int) -> int | None:
    """Take note of all children that have ended. Return the exit code of the program if it is among them."""
    code = None
    for pid, status in ended_children():
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
    return code if code is None or code >= 0 else 128 - code


def _end_all(program: int, wakeup: int) -> int | None:
    """End every process that is left. Return the exit code of the program if it is among them."""
    code = None
    for number, seconds in _ENDINGS:
        deadline = time.monotonic() + seconds
        while has_children() and (left := deadline - time.monotonic()) > 0:
            for child in children_of(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(child, number)
            select.select([wakeup], [], [], min(left, 0.1))  # a child may have started another one meanwhile
            with suppress(BlockingIOError):
                os.read(wakeup, 4096)
            ended = _reap(program)
            code = ended if code is None else code
    return code


def _only_wake(number: int, frame: object) -> None:
    """Handle a signal by nothing: its arrival ends the wait of the loop."""


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), sys.argv[2:]))
