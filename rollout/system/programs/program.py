"""Runs one program, from its start to the end of its last process."""

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO

from slipstream.rollout.system.child import Child
from slipstream.rollout.system.programs.start import kept

TAIL = 1 << 16
"""Bytes of the end of each output that are kept. A program may print as much as it likes."""


@dataclass(frozen=True)
class ProgramEnd:
    """How a program has ended."""

    code: int
    """Exit code; 128 + N where the signal N has ended it."""
    output: str
    """The end of its standard output."""
    errors: str
    """The end of its standard error."""


async def run_program(command: Sequence[str], environment: Mapping[str, str], given: bytes) -> ProgramEnd:
    """Run a program in a session of its own, and return when no process of it is left.

    ``environment``: all of its variables. ``given``: its standard input. When this is cancelled, or this
    process ends for whatever reason, everything that the program has started is ended. Raises OSError when no
    process can be started.
    """
    child = Child()
    await child.start(
        partial(kept, command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        environment=environment,
    )
    process = child.process
    assert process is not None
    try:
        output, errors, _ = await asyncio.gather(
            _tail(process.stdout), _tail(process.stderr), _give(process.stdin, given)
        )
        await asyncio.wait({child.lost})
    finally:
        await child.end()
    return ProgramEnd(process.wait(), output, errors)


async def _give(pipe: IO[bytes] | None, given: bytes) -> None:
    """Write into a pipe, and close it."""
    assert pipe is not None
    loop = asyncio.get_running_loop()
    flow = asyncio.streams.FlowControlMixin()
    transport, _ = await loop.connect_write_pipe(lambda: flow, pipe)
    writer = asyncio.StreamWriter(transport, flow, None, loop)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # it does not read what it is given
            writer.write(given)
            await writer.drain()
    except asyncio.CancelledError:
        transport.abort()
        raise
    writer.close()


async def _tail(pipe: IO[bytes] | None) -> str:
    """Read a pipe to its end, and return its last bytes as text."""
    assert pipe is not None
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), pipe
    )
    tail = b""
    try:
        while data := await stream.read(TAIL):
            tail = (tail + data)[-TAIL:]
    finally:
        transport.close()
    return tail.decode(errors="replace")
