"""A sandbox of processes on this machine."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar, cast

from slipstream.rollout.sandbox import keeper_process
from slipstream.rollout.sandbox.interface import ExecResult, Isolation, SandboxFailed, SandboxRefused
from slipstream.rollout.sandbox.wire import (
    ANSWER,
    Answer,
    Content,
    Created,
    Declined,
    Done,
    Download,
    Exec,
    Executed,
    Failure,
    Limits,
    Request,
    Setup,
    Upload,
    frame,
)
from slipstream.rollout.system.stream import LENGTH

log = logging.getLogger(__name__)

CREATE_S = 30.0
"""Seconds until a sandbox must exist."""

ANSWER_S = 30.0
"""Seconds, beyond those of the command, until a sandbox must have answered. It has hung up by then."""

CLOSE_S = 10.0
"""Seconds until everything in a closed sandbox must have ended."""

_A = TypeVar("_A", bound=Answer)


class LocalSandbox:
    """A ``Sandbox`` of processes on this machine, which the kernel keeps apart as far as it can.

    It ends with this process, by kill -9 too.
    """

    def __init__(self, limits: Limits, readable: Sequence[str] = (), require_isolation: bool = False) -> None:
        """``readable``: folders that commands may read, beyond those of the system and of Python.

        ``require_isolation``: refuse to be created where the kernel allows no namespaces.
        """
        self._setup = Setup(limits, tuple(map(os.path.abspath, readable)), _prefixes())
        self._require_isolation = require_isolation
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()
        self._is_closed = False
        self.isolation: Isolation | None = None
        """How far commands are kept from the machine; None before ``create``."""

    async def create(self) -> Isolation:
        """Make the sandbox. Raises SandboxFailed."""
        if self._streams is not None or self._is_closed:
            raise SandboxFailed("the sandbox was created before")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                await keeper_process.keeper().hand_over(theirs)
            except BaseException:
                ours.close()
                raise
        self._streams = await asyncio.open_unix_connection(sock=ours)
        isolation = (await self._ask(self._setup, Created, CREATE_S)).isolation
        if isolation.level != "namespaces":
            if self._require_isolation:
                await self.close()
                raise SandboxFailed(
                    f"this machine allows no sandbox with namespaces ({isolation.reason}). Allow user "
                    "namespaces (docs/sandbox.md), or set `require_isolation: false` if the code is trusted"
                )
            _warn_once(isolation)
        self.isolation = isolation
        return isolation

    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        wall_s: float | None = None,
    ) -> ExecResult:
        """Run a command and wait for its end, see ``Sandbox.exec``."""
        limit = self._setup.limits.wall_s
        command, env = checked_call(command, stdin, env, wall_s)
        seconds = limit if wall_s is None else min(wall_s, limit)
        request = Exec(command, bytes(stdin), env, seconds)
        return (await self._ask(request, Executed, seconds + ANSWER_S)).result

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file, see ``Sandbox.upload``."""
        await self._ask(Upload(checked_path(path), checked_bytes(data)), Done, ANSWER_S)

    async def download(self, path: str) -> bytes:
        """Return a file, see ``Sandbox.download``."""
        return (await self._ask(Download(checked_path(path)), Content, ANSWER_S)).data

    async def close(self) -> None:
        """End the sandbox with everything in it."""
        self._is_closed = True
        if self._streams is None:
            return
        reader, writer = self._streams
        self._streams = None
        with suppress(OSError, TimeoutError):
            writer.write_eof()
            async with asyncio.timeout(CLOSE_S):
                while await reader.read(1 << 16):
                    """An answer that nobody waits for."""
        self._abort(writer)

    async def _ask(self, request: Request, expected: type[_A], seconds: float) -> _A:
        """Send a request and return its answer. Raises SandboxRefused, SandboxFailed."""
        async with self._turn:
            if self._streams is None:
                raise SandboxFailed(
                    "the sandbox is closed" if self._is_closed else "the sandbox is not created"
                )
            reader, writer = self._streams
            try:
                async with asyncio.timeout(seconds):
                    writer.write(frame(request))
                    await writer.drain()
                    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                    answer = ANSWER.decode(await reader.readexactly(length))
            except BaseException as error:
                # An answer that comes later would be taken for that of the next request.
                self._is_closed, self._streams = True, None
                self._abort(writer)
                if isinstance(error, TimeoutError):
                    text = f"its process has not answered a {type(request).__name__} in {seconds:g} s"
                    raise SandboxFailed(text) from error
                if isinstance(error, OSError | EOFError):
                    raise SandboxFailed("its process has ended") from error
                raise
        if isinstance(answer, Declined):
            raise SandboxRefused(answer.reason)
        if isinstance(answer, expected):
            return answer
        await self.close()
        raise SandboxFailed(answer.reason if isinstance(answer, Failure) else f"it answers with {answer!r}")

    @staticmethod
    def _abort(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()


def checked_call(
    command: Sequence[str], stdin: bytes, env: Mapping[str, str] | None, wall_s: float | None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command and the variables of a call that can be run. Raises SandboxRefused.

    They may come from a policy, whose texts are those of JSON.
    """
    given = cast(object, command)
    if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not given or not given[0]:
        raise SandboxRefused(
            f"{given!r} is no command; expected a program and its arguments, such as ['sh', '-c', 'ls']"
        )
    parts = tuple(_text(part, "the command", command) for part in cast("Sequence[object]", given))
    variables: dict[str, str] = {}
    for name, value in dict(env or {}).items():
        if not name or "=" in _text(name, "the environment", env):
            raise SandboxRefused(f"{name!r} is no name of a variable; expected one without `=`")
        variables[name] = _text(value, "the environment", env)
    checked_bytes(stdin)
    seconds = cast(object, wall_s)
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and cast(float, seconds) > 0):  # NaN is not
        raise SandboxRefused(f"wall_s is {seconds!r}, expected seconds above 0, or None")
    return parts, variables


def checked_path(path: str) -> str:
    """Return the path of a file as it can be sent. Raises SandboxRefused."""
    return _text(path, "the path", path)


def checked_bytes(data: bytes) -> bytes:
    """Return the content of a file or of a standard input. Raises SandboxRefused."""
    if not isinstance(cast(object, data), bytes | bytearray | memoryview):
        raise SandboxRefused(f"found data of type {type(data).__name__}, expected bytes")
    return bytes(data)


def _text(value: object, what: str, whole: object) -> str:
    """Return a text that the kernel can be given. Raises SandboxRefused."""
    if not isinstance(value, str):
        raise SandboxRefused(f"{what} {whole!r} contains a {type(value).__name__}, expected texts")
    if "\0" in value:
        raise SandboxRefused(f"{what} {whole!r} contains a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SandboxRefused(
            f"{what} {whole!r} contains half a surrogate pair, expected text of UTF-8"
        ) from None
    return value


_warned = False


def _warn_once(isolation: Isolation) -> None:
    global _warned
    if not _warned:
        _warned = True
        log.warning(
            "sandboxes have no namespaces here (%s): commands have the isolation %r of docs/sandbox.md, "
            "which does not keep hostile code from the machine",
            isolation.reason,
            isolation.level,
        )


def _prefixes() -> tuple[str, ...]:
    """Return the folders of this Python, and where links to them lead."""
    names = (sys.prefix, sys.base_prefix)
    paths = dict.fromkeys([*names, *map(os.path.realpath, names)])
    return tuple(path for path in paths if path != "/")
