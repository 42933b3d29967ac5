"""The keeper as its owner sees it: started with the first sandbox, one for each process."""

import asyncio
import os
import socket
import struct
import subprocess
import sys
import threading

from slipstream.rollout.sandbox.interface import SandboxFailed

_BOOT = "from slipstream.rollout.sandbox.keeper import keep; keep({}, {})"

_SEND_S = 30.0
"""Seconds until the keeper has taken a connection. It clones some hundred boxes a second."""


class KeeperProcess:
    """A keeper that this process has started. It ends with this process, or with its control socket."""

    def __init__(self) -> None:
        """Start it. Raises OSError."""
        self.owner = os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(_SEND_S), 0))
        with theirs:
            # Its command line and environment tell nothing, because commands may be able to read them. In its
            # own session, because Ctrl-C is for the run.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT.format(theirs.fileno(), self.owner)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                cwd="/",
                start_new_session=True,
            )

    async def hand_over(self, connection: socket.socket) -> None:
        """Ask the keeper to clone a box at the other end of ``connection``. Raises SandboxFailed."""
        try:
            try:
                socket.send_fds(self._control, [b"\0"], [connection.fileno()], socket.MSG_DONTWAIT)
            except BlockingIOError:  # many at a time
                await asyncio.to_thread(socket.send_fds, self._control, [b"\0"], [connection.fileno()])
        except OSError as error:
            raise SandboxFailed(f"the keeper of the sandboxes takes no new one: {error!r}") from error

    @property
    def lives(self) -> bool:
        """True if this process can use it. A fork of its owner cannot."""
        return self.owner == os.getpid() and self._process.poll() is None


_lock = threading.Lock()
_keeper: KeeperProcess | None = None


def keeper() -> KeeperProcess:
    """Return this process's keeper. Start it if there is none, or if it was killed. Raises SandboxFailed."""
    global _keeper
    with _lock:
        if _keeper is None or not _keeper.lives:
            try:
                _keeper = KeeperProcess()
            except OSError as error:
                raise SandboxFailed(f"the keeper of the sandboxes cannot be started: {error}") from error
        return _keeper
