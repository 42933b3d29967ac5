"""The process that clones a box for each sandbox, so that none has to start Python. No foreign code is here.

    owner ──control: one descriptor for each new sandbox──► keeper ──clone──► box ──connection── owner

The keeper finds out once what the kernel allows. When its owner ends, by kill -9 too, the keeper and all
boxes end as well. Until then it ends the processes that outlive a killed box.

It has one thread and few imports, because every box is a copy of it.
"""

import gc
import os
import select
import signal
import socket
import time
from contextlib import suppress
from typing import NoReturn

from slipstream.rollout.sandbox import box, kernel
from slipstream.rollout.sandbox.enclosure import NAMESPACES, limits_processes, map_users
from slipstream.rollout.sandbox.interface import Isolation, Level
from slipstream.rollout.sandbox.wire import (
    ANSWER,
    Answer,
    Created,
    Exec,
    Failure,
    Limits,
    Setup,
    frame,
)
from slipstream.rollout.system.linux import PR_SET_NAME, children_of, ended_children, prctl
from slipstream.rollout.system.programs.keeper import begin_to_keep
from slipstream.rollout.system.stream import receive

_TRIAL = Setup(Limits(5.0, 5.0, 1 << 30, 64, 64, 1 << 20, 1 << 20, 1 << 10), (), ())
_TRIAL_S = 10.0
"""Seconds for the sandbox that shows whether an isolation works, and for a request that fails."""

_END_S = 5.0
"""Seconds in which boxes end by themselves when the owner has. Then they are killed."""


def keep(control_fd: int, owner: int) -> None:
    """Clone boxes until ``owner``, the process at the other end of ``control_fd``, ends. Never returns."""
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    wakeup_reader, wakeup_writer = begin_to_keep()
    prctl(PR_SET_NAME, b"sandbox-keeper")
    gc.collect()
    gc.freeze()
    gc.disable()  # a copy of this process should write to as little of its memory as possible
    _Keeper(control, owner, wakeup_reader, wakeup_writer).run()
    os._exit(0)


class _Keeper:
    """The loop of the keeper, and the boxes that live."""

    def __init__(self, control: socket.socket, owner: int, wakeup: int, wakeup_writer: int) -> None:
        self._control = control
        self._owner = owner
        self._wakeup = wakeup
        self._wakeup_writer = wakeup_writer
        # Each box has the reader, and sees by it that the keeper ends.
        self._alive, self._alive_writer = os.pipe()
        self._boxes: set[int] = set()
        self._isolation: Isolation | None = None

    def run(self) -> None:
        """Clone a box for each descriptor that comes, until the owner ends."""
        poll = select.poll()
        for fd in (self._control.fileno(), self._wakeup):
            poll.register(fd, select.POLLIN)
        while os.getppid() == self._owner:
            for fd, _ in poll.poll():
                if fd == self._wakeup:
                    self._reap()
                elif not self._take():
                    self._end()
                    return
        self._end()

    def _take(self) -> bool:
        """Clone a box for the next connection. Return True if there was one: False is the owner's end."""
        # Before the keeper has a connection, because the box of a trial would keep it open.
        problem = self._find_isolation()
        data, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if not fds:
            return bool(data)
        os.set_inheritable(fds[0], False)  # no command must have it
        with socket.socket(fileno=fds[0]) as connection:
            try:
                if self._isolation is not None:
                    self._clone(connection, self._isolation)
            except OSError as error:
                problem = str(error)
            if problem is not None:
                with suppress(OSError):
                    connection.settimeout(_TRIAL_S)
                    receive(connection)  # a connection that ends with something unread loses what was sent
                    connection.sendall(frame(Failure(f"no sandbox can be made: {problem}")))
        return True

    def _clone(
        self, connection: socket.socket, isolation: Isolation, others: tuple[socket.socket, ...] = ()
    ) -> None:
        """Clone a box. It begins when it has its users. Raises OSError.

        ``others``: sockets of this process that the box must not keep open.
        """
        has_namespaces = isolation.level == "namespaces"
        begin, beginner = os.pipe()
        try:
            pid = kernel.clone(NAMESPACES if has_namespaces else 0)
            if pid == 0:
                self._become_box(
                    connection, isolation, begin, (beginner, *(other.fileno() for other in others))
                )
            self._boxes.add(pid)
            if has_namespaces:
                map_users(pid)
            os.write(beginner, b"\0")
        finally:  # a box without users sees the end of the pipe
            os.close(begin)
            os.close(beginner)

    def _become_box(
        self, connection: socket.socket, isolation: Isolation, begin: int, others: tuple[int, ...]
    ) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            for fd in (*others, self._wakeup, self._wakeup_writer, self._alive_writer):
                os.close(fd)
            self._control.close()
            if os.read(begin, 1):
                os.close(begin)
                prctl(PR_SET_NAME, b"sandbox-box")
                box.serve(connection, self._alive, isolation)
        finally:
            os._exit(0)

    # -- What the kernel allows

    def _find_isolation(self) -> str | None:
        """Find out which is the best isolation that works here. Return why none does; None: one does."""
        if self._isolation is not None:
            return None
        reasons: list[str] = []
        levels: tuple[Level, ...] = ("namespaces", "user", "none")
        for level in levels:
            isolation = Isolation(level, "; ".join(reasons))
            problem = self._try(isolation)
            if problem is None:
                self._isolation = isolation
                return None
            reasons.append(f"{level}: {problem}")
        return f"{'; '.join(reasons)}. Allow user namespaces, or run as another user (docs/sandbox.md)"

    def _try(self, isolation: Isolation) -> str | None:
        """Run a command in a sandbox. Return what goes wrong; None: nothing."""
        if isolation.level == "user" and os.geteuid() != 0:
            return "only root can become other users"
        if isolation.level != "namespaces" and not limits_processes(isolation.level):
            return "the kernel does not limit the processes of root"
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(_TRIAL_S)
            try:
                self._clone(theirs, isolation, (ours,))
                theirs.close()
                ours.sendall(frame(_TRIAL))
                answer = _answer(ours)
                if isinstance(answer, Created):
                    ours.sendall(frame(Exec(("true",), b"", {}, _TRIAL_S)))
                    answer = _answer(ours)
            except OSError as error:
                return str(error)
        if answer is None:
            return "its process has ended"
        return answer.reason if isinstance(answer, Failure) else None

    # -- Ends

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wakeup, 4096)
        for pid, status in ended_children():
            if pid in self._boxes:
                self._boxes.remove(pid)
                if os.WIFSIGNALED(status):
                    self._kill_strays()

    def _kill_strays(self) -> None:
        """Kill what a killed box has left: its children are the keeper's now."""
        while strays := set(children_of(os.getpid())) - self._boxes:
            for pid in strays:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in strays:
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _end(self) -> None:
        """Let the boxes end, for a bounded time."""
        os.close(self._alive_writer)
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        deadline = time.monotonic() + _END_S
        while self._boxes and (left := deadline - time.monotonic()) > 0:
            poll.poll(left * 1000)
            self._reap()
        for pid in self._boxes:
            os.kill(pid, signal.SIGKILL)
        self._boxes.clear()
        self._kill_strays()


def _answer(connection: socket.socket) -> Answer | None:
    data = receive(connection)
    return None if data is None else ANSWER.decode(data)
