"""The interface of a sandbox for workflows, environments and rewards."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

LimitName = Literal["wall", "cpu", "memory", "processes", "file_size", "disk", "output"]
"""A limit that ends a command: elapsed time, processor time, memory of all its processes together, number of
processes and threads, size of one file, size of all files together, bytes printed."""

Level = Literal["namespaces", "user", "none", "unknown"]
"""How far commands are kept from the machine, see docs/sandbox.md. ``unknown``: a server does not say."""


class SandboxFailed(RuntimeError):
    """The sandbox does not work. The error says nothing about the command: an episode that gets it is failed,
    and its policy is not to blame.
    """


class SandboxRefused(ValueError):
    """The sandbox does not do what it is asked, and can still be used: a path that leads out of it, a file
    that does not exist or is too large, a command that is no command.
    """


class Isolation(msgspec.Struct, frozen=True, array_like=True):
    """How far the commands of a sandbox are kept from the machine that they run on."""

    level: Level
    reason: str = ""
    """Why the level is not ``namespaces``; empty if it is."""


class ExecResult(msgspec.Struct, frozen=True):
    """How a command has ended."""

    exit_code: int
    """Exit code; -N after signal N. 127: there is no such command, as ``stderr`` says."""
    stdout: str
    """Text printed. Beyond the limit it is cut, and its last line says so."""
    stderr: str
    limit: LimitName | None
    """The limit that has ended the command; None: no limit has."""
    seconds: float
    """Elapsed time of the command."""

    @property
    def failed(self) -> bool:
        """True if a limit has ended the command, or its exit code is not 0."""
        return self.limit is not None or self.exit_code != 0


class Sandbox(Protocol):
    """A folder and the commands that run in it, one at a time, until it is closed.

    Commands share the files of the sandbox and nothing else. Whatever a command leaves running is killed when
    the command ends. Each method raises SandboxFailed. One that is cancelled closes the sandbox, because
    nobody knows what its command has done by then.
    """

    async def create(self) -> Isolation:
        """Make the sandbox, with an empty folder. Nothing else may be called before."""
        ...

    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        wall_s: float | None = None,
    ) -> ExecResult:
        """Run a program with its arguments, in the folder, and wait for its end. No shell reads ``command``.

        ``env``: variables beyond PATH, HOME, TMPDIR, USER, LANG and OMP_NUM_THREADS, which are set.
        ``wall_s``: a shorter limit than that of the sandbox. Raises SandboxRefused.
        """
        ...

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file, and folders above it. ``path`` is relative to the folder. Raises SandboxRefused."""
        ...

    async def download(self, path: str) -> bytes:
        """Return a file. ``path`` is relative to the folder. Raises SandboxRefused."""
        ...

    async def close(self) -> None:
        """End the sandbox with everything in it. Does nothing the second time. Raises nothing."""
        ...
