"""Messages between a sandbox's owner and its box, one in each frame of ``system.stream``, as msgpack.

    owner ──► box     Setup first, then Exec, Upload and Download, each after the reply to the one before
    box ──► owner     Created, then one ExecResult, Done or Content each; Declined or Failure in place of any

The end of the connection is the end of the sandbox. The box is trusted: no foreign code has the connection.
"""

import msgspec

from slipstream.rollout.sandbox.interface import ExecResult, Isolation
from slipstream.rollout.system.stream import framed


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """The limits of each command and of the files of a sandbox, see ``SandboxLimits``."""

    wall_s: float
    cpu_s: float
    memory: int
    """Bytes, as for all sizes here."""
    processes: int
    open_files: int
    file_size: int
    disk: int
    output: int


class Setup(msgspec.Struct, frozen=True, tag="setup", array_like=True):
    """The first request: what the sandbox is."""

    limits: Limits
    readable: tuple[str, ...]
    """Folders of the machine that commands may read, beyond those of the system."""
    prefixes: tuple[str, ...]
    """Folders of the Python that runs Slipstream, the first one of which has ``bin/python``."""


class Exec(msgspec.Struct, frozen=True, tag="exec", array_like=True):
    """Run a command."""

    command: tuple[str, ...]
    stdin: bytes
    env: dict[str, str]
    wall_s: float


class Upload(msgspec.Struct, frozen=True, tag="upload", array_like=True):
    """Write a file."""

    path: str
    data: bytes


class Download(msgspec.Struct, frozen=True, tag="download", array_like=True):
    """Read a file."""

    path: str


class Created(msgspec.Struct, frozen=True, tag="created", array_like=True):
    """The sandbox exists."""

    isolation: Isolation


class Executed(msgspec.Struct, frozen=True, tag="executed", array_like=True):
    """The command has ended, and everything that it has started."""

    result: ExecResult


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """The file is written."""


class Content(msgspec.Struct, frozen=True, tag="content", array_like=True):
    """The bytes of a file."""

    data: bytes


class Declined(msgspec.Struct, frozen=True, tag="refusal", array_like=True):
    """The request cannot be done; the sandbox can still be used."""

    reason: str


class Failure(msgspec.Struct, frozen=True, tag="failure", array_like=True):
    """The sandbox does not work."""

    reason: str


Request = Setup | Exec | Upload | Download
Answer = Created | Executed | Done | Content | Declined | Failure

REQUEST: "msgspec.msgpack.Decoder[Request]" = msgspec.msgpack.Decoder(Request)
ANSWER: "msgspec.msgpack.Decoder[Answer]" = msgspec.msgpack.Decoder(Answer)
_encoder = msgspec.msgpack.Encoder()


def frame(message: Request | Answer) -> bytes:
    """Return the frame of a message."""
    return framed(_encoder.encode(message))
