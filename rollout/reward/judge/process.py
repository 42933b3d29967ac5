"""One judge process as its pool sees it: started, asked, and ended with everything that it has started."""

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec

from slipstream.rollout.reward.judge.errors import NO_CONNECTION, Ending, JudgeStartFailed
from slipstream.rollout.reward.judge.keeper import REPORT
from slipstream.rollout.reward.judge.output import TAIL
from slipstream.rollout.reward.judge.wire import (
    LONGEST_REPLY,
    REPLY,
    FrameReader,
    JudgeReady,
    JudgeSetup,
    MalformedReply,
    Reply,
    StartFailure,
    framed,
)
from slipstream.rollout.system.linux import kill_users_of
from slipstream.rollout.system.programs.start import python_calling
from slipstream.rollout.system.temporary import OwnedFolder

GRACE_S = 2.0
"""Seconds that a process gets to end by itself, or to be ended by its own watchdog, before the pool acts."""

KILL_S = 8.0
"""Seconds for a keeper to end everything and to report. Then it is killed itself."""


class JudgeProcess:
    """A keeper and the judge in it. ``start`` returns one that can be asked; ``end`` leaves nothing of it."""

    def __init__(self, log: Path, on_reply: Callable[[Reply], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._log = log
        self._on_reply = on_reply
        self._first_reply: asyncio.Future[JudgeReady | StartFailure] = self._loop.create_future()
        self._connection = _Connection(self._received, self._on_garbage)
        self._lifeline = _Lifeline()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._judge: int | None = None
        self._scratch: OwnedFolder | None = None
        self._outgoing: list[bytes] = []
        self._killed_because: str | None = None
        self._end: asyncio.Task[Ending] | None = None
        self.concurrent = False
        """True if questions may overlap."""
        self.of_groups = False
        """True if the reward judges all episodes of a group at once."""

    @classmethod
    async def start(cls, setup: JudgeSetup, log: Path, on_reply: Callable[[Reply], None]) -> "JudgeProcess":
        """Start a process and construct the reward in it. Raises JudgeStartFailed, with the traceback."""
        process = cls(log, on_reply)
        try:
            await process._start(setup)
        except BaseException:
            process.kill("its start has failed")
            await process.end()
            raise
        return process

    async def _start(self, setup: JudgeSetup) -> None:
        limit = f"{setup.start_timeout_s:g} s to start ({setup.section}.start_timeout_s)"
        try:
            frame = framed(setup)
        except (TypeError, OverflowError, UnicodeEncodeError) as error:
            raise _start_failed(setup, f"its args {setup.args} are no plain data: {error}") from error
        try:
            await self._spawn()
        except OSError as error:
            raise _start_failed(setup, f"no process can be started: {error}") from error
        self._end = self._loop.create_task(self._wait_for_end())
        self._write(frame)
        await asyncio.wait(
            {self._first_reply, self._end},
            timeout=setup.start_timeout_s + GRACE_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not self._first_reply.done():
            if not self._end.done():
                self.kill(f"it took longer than {limit}")
            raise _start_failed(setup, (await self.end()).cause(limit))
        reply = self._first_reply.result()
        if isinstance(reply, StartFailure):
            raise _start_failed(setup, reply.reason)
        self._judge, self.concurrent, self.of_groups = reply.pid, reply.concurrent, reply.of_groups

    async def _spawn(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = OwnedFolder(Path(tempfile.gettempdir()), "judge")
        (lifeline, their_lifeline), (connection, their_connection) = socket.socketpair(), socket.socketpair()
        await self._loop.create_unix_connection(lambda: self._lifeline, sock=lifeline)
        await self._loop.create_unix_connection(lambda: self._connection, sock=connection)
        with their_lifeline, their_connection, self._log.open("ab") as errors:
            inherited = their_lifeline.fileno(), their_connection.fileno()
            scratch = str(self._scratch.path)
            args = (*inherited, os.getpid(), scratch, str(self._log.absolute()))
            # In this thread, because the keeper is told when the thread ends that has started it. In its own
            # session, because Ctrl-C is for the run.
            self._keeper = subprocess.Popen(
                python_calling("slipstream.rollout.reward.judge.keeper.keep", *args),
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "TMPDIR": scratch},
                start_new_session=True,
            )

    # -- Asking

    def ask(self, frame: bytes) -> None:
        """Send a frame, together with all others of this turn of the loop."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(frame)

    def _flush(self) -> None:
        frames, self._outgoing = self._outgoing, []
        self._write(b"".join(frames))

    def _write(self, data: bytes) -> None:
        if self._connection.transport is not None:
            self._connection.transport.write(data)

    def _received(self, reply: Reply) -> None:
        if isinstance(reply, JudgeReady | StartFailure):
            if not self._first_reply.done():
                self._first_reply.set_result(reply)
        elif self._killed_because is None:
            self._on_reply(reply)

    def _on_garbage(self, error: Exception) -> None:
        self.kill(f"it has written into the connection of its judge process: {error}")

    # -- Ending

    def kill(self, reason: str) -> None:
        """Have the keeper kill the judge and everything that it has started."""
        if self._killed_because is not None:
            return
        self._killed_because = reason
        if self._lifeline.transport is not None and not self._lifeline.transport.is_closing():
            with suppress(OSError):  # the keeper has gone
                self._lifeline.transport.write_eof()
        self._loop.call_later(KILL_S, self._insist)

    def close(self) -> None:
        """Let an idle judge end by itself. It is killed if it does not within GRACE_S."""
        if self._connection.transport is not None:
            self._connection.transport.close()

    async def ended(self) -> Ending:
        """Wait until nothing of the process is left, and return how it has ended. It need not be told to."""
        assert self._end is not None, "a process is waited for that was never started"
        return await asyncio.shield(self._end)

    async def end(self) -> Ending:
        """Wait for a process that was killed or closed, for a bounded time.

        A caller that is cancelled waits nevertheless: it would leave the process behind.
        """
        if self._end is None:  # it has not been started as a whole
            self._kill_keeper()
            self._drop()
            return Ending(None, killed_because=self._killed_because)
        deadline = self._loop.time() + 2 * GRACE_S + 3 * KILL_S
        cancelled: asyncio.CancelledError | None = None
        while not self._end.done() and (left := deadline - self._loop.time()) > 0:
            try:
                await asyncio.wait({self._end}, timeout=left)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return self._end.result() if self._end.done() else Ending(None, killed_because="nothing can end it")

    async def _wait_for_end(self) -> Ending:
        lost = {self._lifeline.lost, self._connection.lost}
        await asyncio.wait(lost, return_when=asyncio.FIRST_COMPLETED)
        if not self._lifeline.lost.done():
            # A keeper reports at once. If it does not, its judge goes on without a connection.
            await asyncio.wait({self._lifeline.lost}, timeout=GRACE_S)
            if not self._lifeline.lost.done():
                self.kill(NO_CONNECTION)
                await asyncio.wait({self._lifeline.lost}, timeout=2 * KILL_S)
        if not self._lifeline.report:
            self._kill_keeper()
        await asyncio.wait({self._connection.lost}, timeout=GRACE_S)  # for replies from before the end
        await asyncio.to_thread(self._drop)
        return self._ending()

    def _ending(self) -> Ending:
        report = bytes(self._lifeline.report)
        if len(report) < REPORT.size:
            return Ending(None, "", _tail(self._log), self._killed_because)
        status, crash, output = REPORT.unpack_from(report)
        texts = report[REPORT.size :]
        return Ending(
            status,
            texts[:crash].decode(errors="replace"),
            texts[crash : crash + output].decode(errors="replace"),
            self._killed_because,
        )

    def _insist(self) -> None:
        """Kill a keeper that does not answer: user code may have stopped it."""
        if not self._lifeline.lost.done():
            self._kill_keeper()

    def _kill_keeper(self) -> None:
        """Kill the process from outside. The judge dies with its keeper; its children are in its group."""
        if self._keeper is not None:
            self._keeper.kill()
        if self._judge is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._judge, signal.SIGKILL)

    def _drop(self) -> None:
        """Take the keeper's exit status, close the connections and remove what the keeper has left."""
        if self._keeper is not None:
            with suppress(subprocess.TimeoutExpired):
                self._keeper.wait(GRACE_S)
        if self._scratch is not None:
            if self._scratch.path.exists():  # its keeper was killed
                kill_users_of(str(self._scratch.path))
            self._scratch.remove()
        for transport in (self._connection.transport, self._lifeline.transport):
            if transport is not None:
                self._loop.call_soon_threadsafe(transport.abort)


def _start_failed(setup: JudgeSetup, reason: str) -> JudgeStartFailed:
    return JudgeStartFailed(f"the reward {setup.path} cannot be started: {reason}")


def _tail(log: Path) -> str:
    """Return the end of a log: a keeper that cannot start has nobody else to tell."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        return file.read().decode(errors="replace")
    return ""


class _Connection(asyncio.Protocol):
    """Replies of the judge."""

    def __init__(self, received: Callable[[Reply], None], on_garbage: Callable[[Exception], None]) -> None:
        self._received = received
        self._on_garbage = on_garbage
        self._reader = FrameReader(LONGEST_REPLY)
        self.transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self._received(REPLY.decode(frame))
        except (MalformedReply, msgspec.MsgspecError) as error:
            self._on_garbage(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


class _Lifeline(asyncio.Protocol):
    """The keeper's report, and its end."""

    def __init__(self) -> None:
        self.report = bytearray()
        self.transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.report += data

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
