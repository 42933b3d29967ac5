"""One child as its owner sees it: a process in which code of others runs, with a keeper around it.

    owner ──lifeline── keeper ── kept process ── its children
      └──────────── frames ───────────┘

A child ends with everything that it has started when its owner ends it or dies (kill -9 included): the keeper
sees the end of the lifeline (``programs/keeper.py``). A keeper that does not answer is killed from outside.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from socket import socket, socketpair
from typing import IO, Any, cast

from slipstream.rollout.system.stream import LONGEST_CONTENT, FrameReader, FrameTooLong

GRACE_S = 2.0
"""Seconds for a keeper whose lifeline has ended to be gone."""

KILL_S = 8.0
"""Seconds for a keeper to end everything. Then it is killed itself, and what it keeps with it."""


Output = IO[bytes] | int
"""A file, or ``subprocess.PIPE`` or ``subprocess.DEVNULL``."""


class Child:
    """One child. Single event loop. ``end`` it on every path, or ``drop`` it when it has gone."""

    def __init__(
        self,
        on_frame: Callable[[bytes], None] | None = None,
        on_garbage: Callable[[FrameTooLong], None] = lambda error: None,
        longest: int = LONGEST_CONTENT,
    ) -> None:
        """``on_frame``: takes the content of each frame; None: the child has no connection for frames.
        ``on_garbage``: hears of a content of more than ``longest`` bytes.
        """
        self._loop = asyncio.get_running_loop()
        self._on_frame = on_frame
        self._on_garbage = on_garbage
        self._reader = FrameReader(longest)
        self._outgoing: list[bytes] = []
        self.report = bytearray()
        """The keeper's report on the end of the process."""
        self._lifeline = _End(self.report.extend)
        self._connection = _End(self._received)
        self.process: subprocess.Popen[bytes] | None = None
        """The keeper; None: it was not started."""
        self.kept: int | None = None
        """Id of the kept process and of its session, where its owner knows it."""

    async def start(
        self,
        command: Callable[..., Sequence[str]],
        *,
        stdin: Output = subprocess.DEVNULL,
        stdout: Output = subprocess.DEVNULL,
        stderr: Output,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the keeper. Raises OSError; nothing is left then.

        ``command``: of the keeper, given the descriptors of its lifeline and, if the child has one, of the
        connection for frames. ``environment``: all variables; None: those of this process.
        """
        ends = [self._lifeline] if self._on_frame is None else [self._lifeline, self._connection]
        try:
            with ExitStack() as stack:
                inherited = [stack.enter_context(await end.connected()).fileno() for end in ends]
                # In this thread, because a keeper is told when the thread ends that has started it. In a
                # session of its own, because Ctrl-C is for the run. Without asyncio's subprocesses, which
                # need a policy of event loops that libraries replace.
                self.process = subprocess.Popen(
                    command(*inherited),
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=inherited,
                    env=None if environment is None else dict(environment),
                    start_new_session=True,
                )
        except BaseException:
            self.drop()
            raise

    @property
    def lost(self) -> "asyncio.Future[None]":
        """Done when the keeper has ended, and with it everything."""
        return self._lifeline.lost

    @property
    def hung_up(self) -> "asyncio.Future[None]":
        """Done when no more frames will come."""
        return self._connection.lost

    # -- Frames

    def send(self, frame: bytes) -> None:
        """Send a frame, together with all others of this turn of the loop."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(frame)

    def _flush(self) -> None:
        frames, self._outgoing = self._outgoing, []
        if self._connection.transport is not None:
            self._connection.transport.write(b"".join(frames))

    def _received(self, data: bytes) -> None:
        assert self._on_frame is not None
        try:
            for content in self._reader.feed(data):
                self._on_frame(content)
        except FrameTooLong as error:
            self._on_garbage(error)

    def hang_up(self) -> None:
        """Close the connection for frames, by which a child learns that it is not needed any more."""
        if self._connection.transport is not None:
            self._connection.transport.close()

    # -- Ending

    def kill(self) -> None:
        """Have the keeper end everything. It is killed itself if it has not done so after KILL_S."""
        transport = self._lifeline.transport
        if transport is not None and not transport.is_closing():
            with suppress(OSError):  # the keeper has gone
                transport.write_eof()
        self._loop.call_later(KILL_S, self._insist)

    def _insist(self) -> None:
        if not self.lost.done():  # code of others may have stopped the keeper
            self.kill_keeper()

    def kill_keeper(self) -> None:
        """Kill the keeper. The kept process dies with it; the children of that one are in its group."""
        if self.process is not None:
            self.process.kill()
        if self.kept is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.kept, signal.SIGKILL)

    async def end(self) -> None:
        """End the child with everything that it has started, in a bounded time.

        A caller that is cancelled waits nevertheless.
        """
        try:
            if self.process is not None and not self.lost.done():
                self.kill()
                await outlast({self.lost}, 2 * KILL_S)
        finally:
            self.drop()

    def drop(self) -> None:
        """Take the exit status of a keeper that has ended, and close the connections. From any thread."""
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
        for end in (self._connection, self._lifeline):
            if end.transport is not None:
                self._loop.call_soon_threadsafe(end.transport.abort)


class _End(asyncio.Protocol):
    """The owner's end of a socket of a child."""

    def __init__(self, received: Callable[[bytes], None]) -> None:
        self._received = received
        self.transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def connected(self) -> socket:
        """Make the socket. Return the child's end."""
        ours, theirs = socketpair()
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        return theirs

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


async def outlast(awaited: "set[asyncio.Future[Any]]", timeout_s: float) -> None:
    """Wait until all are done, or for the time.

    A cancelled caller waits nevertheless, and is cancelled then: otherwise a process would go on running.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    cancelled: asyncio.CancelledError | None = None
    while awaited and (left := deadline - asyncio.get_running_loop().time()) > 0:
        try:
            _, awaited = await asyncio.wait(awaited, timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
            awaited = {each for each in awaited if not each.done()}
    if cancelled is not None:
        raise cancelled
