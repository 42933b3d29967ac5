"""A program of the user's that lives on and answers one request after the other.

asker ──lifeline── keeper ── program ── its children
  └───── requests and replies ──┘

A frame is the number of its bytes, u64 little-endian, and the bytes.
"""

import asyncio
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from slipstream.rollout.system.programs.program import KILL_S
from slipstream.rollout.system.programs.start import start_kept

LENGTH = struct.Struct("<Q")
MOST_BYTES = 1 << 32
"""Longest frame. A program that announces a longer one is not answering in frames."""


class ProgramGone(RuntimeError):
    """A program has ended, or has answered with what is no frame."""


class ServedProgram:
    """One running program. Single event loop, one request at a time. ``end`` it on every path."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        lifeline: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._lifeline = lifeline
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, command_of: Callable[[int], Sequence[str]], log: Path) -> Self:
        """Start a program, whose output is appended to ``log``. Raises OSError.

        ``command_of``: its command, given the descriptor of the socket on which it answers.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        lifeline, kept = socket.socketpair()
        try:
            with theirs, kept, log.open("ab") as output:
                process = start_kept(
                    command_of(theirs.fileno()),
                    kept.fileno(),
                    inherited=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
        except BaseException:
            ours.close()
            lifeline.close()
            raise
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, lifeline, reader, writer)

    async def ask(self, request: bytes) -> bytes:
        """Return the reply to a request. Raises ProgramGone. A caller that gives up must ``end`` it."""
        try:
            self._writer.writelines((LENGTH.pack(len(request)), request))
            await self._writer.drain()
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > MOST_BYTES:
                raise ProgramGone(f"it has announced a reply of {length} bytes")
            return await self._reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            raise ProgramGone("its process has ended") from None

    async def end(self) -> None:
        """End the program and everything that it has started. Returns after a bounded time."""
        self._lifeline.close()  # the keeper takes it for the end of this process
        self._writer.close()
        try:
            await asyncio.wait_for(asyncio.to_thread(self._process.wait, KILL_S), KILL_S + 1)
        except (subprocess.TimeoutExpired, TimeoutError):
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


class Answering:
    """The program's end of the socket."""

    def __init__(self, descriptor: int) -> None:
        """Output of the program's code does not mix with replies: they have a socket of their own."""
        os.set_inheritable(descriptor, False)
        self._stream = socket.socket(fileno=descriptor).makefile("rwb")

    def receive(self) -> bytes | None:
        """Wait for the next request. Return None behind the last one."""
        header = self._stream.read(LENGTH.size)
        if len(header) < LENGTH.size:
            return None
        return self._stream.read(LENGTH.unpack(header)[0])

    def reply(self, reply: bytes) -> None:
        with suppress(BrokenPipeError):
            self._stream.write(LENGTH.pack(len(reply)) + reply)
            self._stream.flush()
