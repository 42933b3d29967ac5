"""The process of one sandbox: has its namespaces and files, and does what its owner asks. No foreign code."""

import select
import socket
from contextlib import suppress

from slipstream.rollout.sandbox.enclosure import Enclosure, enclose
from slipstream.rollout.sandbox.interface import Isolation, SandboxFailed, SandboxRefused
from slipstream.rollout.sandbox.paths import Folder
from slipstream.rollout.sandbox.running import OwnerGone, Run
from slipstream.rollout.sandbox.wire import (
    REQUEST,
    Answer,
    Content,
    Created,
    Declined,
    Done,
    Download,
    Exec,
    Executed,
    Failure,
    Request,
    Setup,
    Upload,
    frame,
)
from slipstream.rollout.system.stream import receive


def serve(connection: socket.socket, keeper: int, isolation: Isolation) -> None:
    """Run a sandbox until the connection ends, or until the descriptor ``keeper`` becomes readable."""
    enclosure: Enclosure | None = None
    try:
        setup = _first_request(connection)
        if setup is None:
            return
        enclosure = enclose(setup, isolation)
        connection.sendall(frame(Created(isolation)))
        box = _Box(setup, enclosure, (connection.fileno(), keeper))
        while (request := _next_request(connection, keeper)) is not None:
            connection.sendall(frame(box.answer(request)))
    except OwnerGone:
        """Nobody waits for an answer any more."""
    except Exception as error:
        with suppress(OSError):
            connection.sendall(frame(Failure(f"{type(error).__name__}: {error}")))
    finally:
        if enclosure is not None:
            enclosure.remove()


def _first_request(connection: socket.socket) -> Setup | None:
    data = receive(connection)
    request = None if data is None else REQUEST.decode(data)
    if request is not None and not isinstance(request, Setup):
        raise SandboxFailed(f"the first request is a {type(request).__name__}; expected a Setup")
    return request


def _next_request(connection: socket.socket, keeper: int) -> Request | None:
    """Wait for a request. None: the sandbox is over."""
    poll = select.poll()
    for fd in (connection.fileno(), keeper):
        poll.register(fd, select.POLLIN)
    if any(fd == keeper for fd, _ in poll.poll()):
        return None
    data = receive(connection)
    return None if data is None else REQUEST.decode(data)


class _Box:
    """A sandbox that exists."""

    def __init__(self, setup: Setup, enclosure: Enclosure, owners: tuple[int, int]) -> None:
        self._limits = setup.limits
        self._enclosure = enclosure
        self._owners = owners
        self._folder = Folder(enclosure.folder, enclosure.user)

    def answer(self, request: Request) -> Answer:
        """Do what is asked. Raises OwnerGone, and OSError when the sandbox does not work."""
        try:
            match request:
                case Exec():
                    return Executed(Run(request, self._limits, self._enclosure, self._owners).result())
                case Upload():
                    return self._upload(request)
                case Download():
                    return Content(self._folder.read(request.path, self._limits.file_size))
                case Setup():
                    return Declined("the sandbox exists already")
        except SandboxRefused as error:
            return Declined(str(error))
        except SandboxFailed as error:
            return Failure(str(error))

    def _upload(self, request: Upload) -> Answer:
        if len(request.data) > self._limits.file_size:
            raise SandboxRefused(
                f"{request.path!r} has {len(request.data)} bytes; at most "
                f"{self._limits.file_size} can be uploaded"
            )
        self._folder.write(request.path, request.data)
        return Done()
