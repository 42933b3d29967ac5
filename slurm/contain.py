"""Run a command so that nothing it starts outlives it.

    contain.py [--until-stdin-closes] -- COMMAND [ARGUMENT ...]

The command gets its own session. This process adopts whatever the command's descendants orphan (it is
their "child subreaper"), so daemons that detach themselves are found as well. It kills all of them, by pid,
once the command has ended (SIGTERM, then SIGKILL) or this process has lost its parent (SIGKILL at once: the
job is over, and its nodes may already belong to the next one). A site whose Slurm tracks processes by cgroup
does the same when a job is over; this works on every site, and while the job is still running.

Without --until-stdin-closes: SIGTERM and SIGINT go to the command, which may take all the time it wants.
With it: the command ends when stdin does. That is how the batch script stops a node: srun hands its stdin to
every task, and the pipe closes on *every* end of the batch script, SIGKILL included. SIGTERM and SIGINT are
ignored then, because `scancel` sends them to all steps at once, and Ray has to outlive the run's last save.

Exits with the command's code (128 + N when signal N killed it), or 0 when it was stopped by the end of stdin.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL. Ray needs about 2 s; most sites kill a cancelled job after 30 s."""
GIVE_UP_S = 20.0
"""After SIGKILL. What is left then hangs in the kernel (a lost file system or GPU); no wait would help."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_DIED = signal.SIGHUP

_libc = ctypes.CDLL(None, use_errno=True)


def descendants(root: int) -> list[int]:
    """Living pids below `root`, from /proc; a zombie is not living."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The second field is the name in parentheses, and may itself hold spaces and parentheses.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # ended while we looked
            continue
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def send(pids: list[int], signum: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


class Container:
    """The command and everything below it; `run` returns this process's exit code."""

    def __init__(self, command: list[str], until_stdin_closes: bool) -> None:
        self._command = command
        self._until_stdin_closes = until_stdin_closes
        self._stdin_is_open = until_stdin_closes
        self._pid = 0
        self._code: int | None = None
        self._wakeup, writer = os.pipe()
        for end in (self._wakeup, writer):
            os.set_blocking(end, False)
        # Signals become bytes in this pipe, so that one select() waits for all there is to wait for.
        signal.set_wakeup_fd(writer)
        for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, PARENT_DIED):
            signal.signal(signum, lambda *_: None)

    def run(self) -> int:
        self._start()
        asked_to_end = parent_died = False
        while self._code is None and not asked_to_end and not parent_died:
            for event in self._events(None):
                if event is None:
                    send([self._pid], signal.SIGTERM)
                    asked_to_end = True
                elif event == PARENT_DIED:
                    parent_died = True
                elif event in (signal.SIGTERM, signal.SIGINT) and not self._until_stdin_closes:
                    send([self._pid], event)
        if asked_to_end and not parent_died:
            self._let_it_end(GRACE_S)
        self._kill_rest(signal.SIGKILL if parent_died else signal.SIGTERM)
        if asked_to_end:
            return 0
        return 128 + PARENT_DIED if self._code is None or parent_died else self._code

    def _start(self) -> None:
        parent = os.getppid()
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _libc.prctl(PR_SET_PDEATHSIG, PARENT_DIED, 0, 0, 0)
        self._pid = os.fork()
        if self._pid == 0:
            self._become_command()
        if os.getppid() != parent:  # it died before the kernel knew that we want to be told
            signal.raise_signal(PARENT_DIED)

    def _become_command(self) -> None:
        """Become the command, in the forked child. Never returns."""
        try:
            os.setsid()
            # Only for the case that this container is itself killed with SIGKILL.
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, PARENT_DIED):
                signal.signal(signum, signal.SIG_DFL)
            if self._until_stdin_closes:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # stdin is ours to watch
            os.execvp(self._command[0], self._command)
        except OSError as error:
            print(f"contain.py: cannot run {self._command[0]}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(127)

    def _events(self, timeout_s: float | None) -> list[int | None]:
        """Wait for signals (their numbers) and the end of stdin (None); reap ended children on the way."""
        watched = [self._wakeup] + ([0] if self._stdin_is_open else [])
        ready, _, _ = select.select(watched, [], [], timeout_s)
        events: list[int | None] = []
        if self._wakeup in ready:
            events += os.read(self._wakeup, 4096)
        if 0 in ready and not os.read(0, 4096):
            self._stdin_is_open = False
            events.append(None)
        self._reap()
        return events

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._code = os.waitstatus_to_exitcode(status)
                if self._code < 0:
                    self._code = 128 - self._code

    def _let_it_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._code is None and time.monotonic() < deadline:
            self._events(max(0.0, deadline - time.monotonic()))

    def _kill_rest(self, first: signal.Signals) -> None:
        """SIGTERM once to all that is still below this process, then SIGKILL; or SIGKILL `first`."""
        for signum, seconds in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GIVE_UP_S)):
            if signum == signal.SIGTERM != first:
                continue
            deadline = time.monotonic() + seconds
            signalled: set[int] = set()
            while left := descendants(os.getpid()):
                send([pid for pid in left if pid not in signalled], signum)
                signalled.update(left)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                # Every death below reaches us as SIGCHLD, but a process forked since we looked does not.
                self._events(min(remaining, 0.5))
        if left := descendants(os.getpid()):
            print(f"contain.py: still running after SIGKILL: {left}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command so that nothing it starts outlives it.")
    parser.add_argument("--until-stdin-closes", action="store_true", help="the command ends when stdin does")
    parser.add_argument("command", nargs="+", help="after --: the command and its arguments")
    options = parser.parse_args()
    return Container(options.command, options.until_stdin_closes).run()


if __name__ == "__main__":
    sys.exit(main())
