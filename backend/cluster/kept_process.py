"""A process that its starter watches and ends, and that may outlive it: the next starter takes it over.

    start ──► identity in a file ──► watched ──► ended
                      │                ▲
    starter killed ───┘   taken over ──┘   if the file names a living process with the same command

It is a child of the driver, but in a session of its own and without the mark of the run's guard
(``cluster/guard.py``): neither Ctrl-C nor the death of the driver ends it.
"""

import asyncio
import hashlib
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from slipstream.backend.cluster.guard import VARIABLE
from slipstream.rollout.engine.leftovers import ProcessIdentity, process_of
from slipstream.rollout.system.durable import write_durably

END_S = 10.0
"""Seconds for a process to end after it was asked to. Then it is killed."""


class _Record(msgspec.Struct, frozen=True):
    """Content of the file of a process."""

    process: ProcessIdentity
    command: str
    """SHA-256 of the command."""


class KeptProcess:
    """One living process. Single event loop. ``end`` it on every path on which its starter ends."""

    def __init__(self, pid: int, descriptor: int, file: Path, child: subprocess.Popen[bytes] | None) -> None:
        """``descriptor``: of the process, owned by this object. ``child``: None if it was taken over."""
        self.pid = pid
        self.is_taken_over = child is None
        self._descriptor = descriptor
        self._file = file
        self._child = child
        self._exit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(descriptor, self._ended)

    @classmethod
    def taken_over(cls, command: Sequence[str], file: Path) -> Self | None:
        """Take over the process that ``file`` names; None if it is gone, or was started otherwise.

        One that was started otherwise, with other settings for example, is killed.
        """
        try:
            record = msgspec.json.decode(file.read_bytes(), type=_Record)
        except (OSError, msgspec.MsgspecError):
            return None
        pid = record.process.pid
        if process_of(pid) != record.process:
            return None
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        if process_of(pid) != record.process:  # another one has got its id in between
            os.close(descriptor)
            return None
        if record.command != _digest(command):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
            return None
        return cls(pid, descriptor, file, None)

    @classmethod
    def start(cls, command: Sequence[str], file: Path, log: Path) -> Self:
        """Start a process, whose identity is written to ``file`` and whose output goes to ``log``."""
        variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
        log.parent.mkdir(parents=True, exist_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
        try:
            descriptor = os.pidfd_open(child.pid)  # it is not reaped before ``_ended``
            process = process_of(child.pid)
            assert process is not None
            write_durably(file, msgspec.json.encode(_Record(process, _digest(command))).decode())
        except BaseException:
            child.kill()
            child.wait()
            raise
        return cls(child.pid, descriptor, file, child)

    async def wait(self) -> int | None:
        """Wait for the end of the process. Return its exit code; None if it was taken over."""
        await asyncio.shield(self._exit)
        return self._child.returncode if self._child is not None else None

    async def end(self) -> None:
        """Ask the process to end, and kill it and its children if it has not ended after END_S."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_S):
                await self.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            await self.wait()
        self._file.unlink(missing_ok=True)

    def _signal(self, number: signal.Signals) -> None:
        if not self._exit.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        if self._child is not None:
            self._child.wait()
        if not self._exit.done():
            self._exit.set_result(None)


def _digest(command: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(command).encode()).hexdigest()
