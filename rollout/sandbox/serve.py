"""Serves sandboxes of this machine over HTTP: ``python -m slipstream.rollout.sandbox.serve``.

So code of a policy runs on machines that have nothing else to lose. The protocol is in `protocol.py`.
"""

from slipstream.rollout.system import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()

import argparse
import asyncio
import hmac
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web
from pydantic import ValidationError

from slipstream.configs.schema.sandbox import SandboxLimits
from slipstream.rollout.sandbox.interface import SandboxFailed, SandboxRefused
from slipstream.rollout.sandbox.local import LocalSandbox
from slipstream.rollout.sandbox.open import limits_of
from slipstream.rollout.sandbox.protocol import (
    FAILED,
    FULL,
    NAME_PATTERN,
    REFUSED,
    CreateBody,
    CreatedBody,
    ErrorBody,
    ExecBody,
)

log = logging.getLogger(__name__)

LARGEST = SandboxLimits(
    wall_s=600,
    cpu_s=600,
    memory_mb=4096,
    processes=512,
    open_files=4096,
    file_mb=512,
    disk_mb=2048,
    output_kb=4096,
)
"""Limits that clients may ask for, if the command line does not say others."""

SHORTEST_KEY = 16
LONGEST_IDLE_S = 86_400.0
SHUTDOWN_S = 1.0
"""Seconds for open requests when the server is told to end. Then their commands are killed."""

_JSON = "application/json"
_B = TypeVar("_B")


class _Served:
    """A sandbox of a client, and the timer that closes it."""

    def __init__(self, sandbox: LocalSandbox, idle_s: float) -> None:
        self.sandbox = sandbox
        self.created: asyncio.Task[CreatedBody] | None = None
        self.idle_s = idle_s
        self.requests = 0
        self.timer: asyncio.TimerHandle | None = None


class SandboxServer:
    """The sandboxes of all clients."""

    def __init__(
        self, key: str, most: int, largest: SandboxLimits, readable: tuple[str, ...], require_isolation: bool
    ) -> None:
        """``most``: sandboxes at a time. ``largest``: limits that clients may ask for."""
        self._key = f"Bearer {key}".encode()
        self._most = most
        self._largest = largest
        self._readable = readable
        self._require_isolation = require_isolation
        self._served: dict[str, _Served] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def application(self) -> web.Application:
        """Return the application, whose clean-up closes all sandboxes."""
        largest_body = 2 * (self._largest.file_mb << 20) + (1 << 20)
        application = web.Application(middlewares=[self._guard], client_max_size=largest_body)
        name = f"/sandboxes/{{name:{NAME_PATTERN}}}"
        application.router.add_put(name, self._create)
        application.router.add_delete(name, self._delete)
        application.router.add_post(f"{name}/exec", self._exec)
        application.router.add_put(f"{name}/files", self._upload)
        application.router.add_get(f"{name}/files", self._download)
        application.on_cleanup.append(self._close_all)
        return application

    # -- Requests

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse requests without the key, and answer errors with what they say."""
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), self._key):
            return _failure(401, "this request has no valid key (Authorization: Bearer KEY)")
        try:
            return await handler(request)
        except SandboxRefused as error:
            return _failure(REFUSED, str(error))
        except SandboxFailed as error:
            self._drop(request.match_info["name"])
            return _failure(FAILED, str(error))
        except (msgspec.MsgspecError, UnicodeError) as error:
            return _failure(400, f"malformed body: {error}")
        except web.HTTPException as error:
            return _failure(error.status, error.reason)

    async def _create(self, request: web.Request) -> web.Response:
        body = _decoded(await request.read(), CreateBody)
        name = request.match_info["name"]
        served = self._served.get(name)
        if served is None:
            if len(self._served) >= self._most:
                return _failure(FULL, f"all {self._most} sandboxes are in use")
            limits = limits_of(self._checked(body.limits))
            sandbox = LocalSandbox(limits, self._readable, self._require_isolation)
            served = self._served[name] = _Served(sandbox, min(max(body.idle_s, 1.0), LONGEST_IDLE_S))
            served.created = asyncio.create_task(_created(sandbox))
        assert served.created is not None
        with _InUse(self, name, served):
            # A client that hangs up may ask again: the sandbox is created all the same.
            return _success(await asyncio.shield(served.created))

    async def _exec(self, request: web.Request) -> web.Response:
        body = _decoded(await request.read(), ExecBody)
        served = self._find(request)
        try:
            with _InUse(self, request.match_info["name"], served):
                result = await served.sandbox.exec(
                    body.command, stdin=body.stdin, env=body.env, wall_s=body.wall_s
                )
        except asyncio.CancelledError:  # the client has hung up, and its command is killed
            self._drop(request.match_info["name"])
            raise
        return _success(result)

    async def _upload(self, request: web.Request) -> web.Response:
        data = await request.read()
        served = self._find(request)
        with _InUse(self, request.match_info["name"], served):
            await served.sandbox.upload(_path(request), data)
        return web.Response(status=204)

    async def _download(self, request: web.Request) -> web.Response:
        served = self._find(request)
        with _InUse(self, request.match_info["name"], served):
            return web.Response(body=await served.sandbox.download(_path(request)))

    async def _delete(self, request: web.Request) -> web.Response:
        served = self._drop(request.match_info["name"])
        if served is not None:
            await served.sandbox.close()
        return web.Response(status=204)

    # -- Sandboxes

    def _find(self, request: web.Request) -> _Served:
        served = self._served.get(request.match_info["name"])
        if served is None:
            raise web.HTTPNotFound(reason="there is no such sandbox: it is closed or was never created")
        return served

    def _checked(self, limits: dict[str, int | float]) -> SandboxLimits:
        """Return the limits that a client asks for. Raises SandboxRefused, with all that are too large."""
        try:
            asked = SandboxLimits.model_validate(limits)
        except ValidationError as error:
            problems = [f"{problem['loc'][0]}: {problem['msg']}" for problem in error.errors()]
            raise SandboxRefused(f"malformed limits: {'; '.join(problems)}") from error
        pairs = [
            (name, getattr(asked, name), getattr(self._largest, name)) for name in SandboxLimits.model_fields
        ]
        wrong = [f"{name} is {value:g}, at most {most:g}" for name, value, most in pairs if value > most]
        if wrong:
            raise SandboxRefused(f"this server does not allow these limits: {'; '.join(wrong)}")
        return asked

    def arm(self, name: str, served: _Served) -> None:
        """Close a sandbox when nobody has asked it anything for its ``idle_s``."""
        served.timer = asyncio.get_running_loop().call_later(served.idle_s, self._drop, name)

    def serves(self, name: str) -> bool:
        """True if a sandbox is not closed."""
        return name in self._served

    def _drop(self, name: str) -> _Served | None:
        """Forget a sandbox, and close it in the background."""
        served = self._served.pop(name, None)
        if served is not None:
            if served.timer is not None:
                served.timer.cancel()
            task = asyncio.create_task(served.sandbox.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return served

    async def _close_all(self, application: web.Application) -> None:
        for name in list(self._served):
            self._drop(name)
        await asyncio.gather(*self._closing)


class _InUse:
    """Keeps a sandbox from being closed as idle while it answers."""

    def __init__(self, server: SandboxServer, name: str, served: _Served) -> None:
        self._server, self._name, self._served = server, name, served

    def __enter__(self) -> None:
        self._served.requests += 1
        if self._served.timer is not None:
            self._served.timer.cancel()

    def __exit__(self, *_: object) -> None:
        self._served.requests -= 1
        if not self._served.requests and self._server.serves(self._name):
            self._server.arm(self._name, self._served)


async def _created(sandbox: LocalSandbox) -> CreatedBody:
    isolation = await sandbox.create()
    return CreatedBody(isolation.level, isolation.reason)


def _decoded(data: bytes, kind: type[_B]) -> _B:
    return msgspec.json.decode(data, type=kind)


def _path(request: web.Request) -> str:
    return request.query.get("path", "")


def _success(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type=_JSON)


def _failure(status: int, text: str) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(ErrorBody(text)), content_type=_JSON)


# -- The command


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.rollout.sandbox.serve",
        description="Serve sandboxes of this machine over HTTP.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8700, help="port; 0: a free one (default: %(default)s)")
    parser.add_argument("--most", type=int, default=256, help="sandboxes at a time (default: %(default)s)")
    parser.add_argument(
        "--key-variable",
        default="SLIPSTREAM_SANDBOX_KEY",
        help="environment variable with the key (%(default)s)",
    )
    parser.add_argument(
        "--largest",
        action="append",
        default=[],
        metavar="LIMIT=NUMBER",
        help="largest limit, such as memory_mb=8192",
    )
    parser.add_argument("--readable", action="append", default=[], help="folder that commands may read")
    parser.add_argument(
        "--allow-weak-isolation",
        action="store_true",
        help="serve where the kernel does not allow namespaces, too",
    )
    return parser.parse_args()


def _largest(pairs: list[str]) -> SandboxLimits:
    """Return the largest limits of the command line. Raises ValueError, ValidationError."""
    values: dict[str, float] = dict(LARGEST)
    for pair in pairs:
        name, _, number = pair.partition("=")
        if name not in values:
            raise ValueError(
                f"--largest {pair}: there is no limit {name!r}; expected one of {', '.join(values)}"
            )
        try:
            values[name] = float(number) if name.endswith("_s") else int(number)
        except ValueError as error:
            raise ValueError(f"--largest {pair}: {number!r} is no number") from error
    return SandboxLimits.model_validate(values)


async def _serve(server: SandboxServer, host: str, port: int) -> None:
    # A command whose client hangs up is cancelled.
    runner = web.AppRunner(
        server.application(),
        handler_cancellation=True,
        keepalive_timeout=LONGEST_IDLE_S,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        print(f"serving sandboxes on http://{host}:{runner.addresses[0][1]}", flush=True)
        end = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, end.set)
        await end.wait()
    finally:
        await runner.cleanup()


def main() -> int:
    """Serve until SIGTERM or SIGINT. Return the exit code: 2 for bad input."""
    options = _arguments()
    logging.basicConfig(level=logging.INFO)
    problems: list[str] = []
    largest = LARGEST
    try:
        largest = _largest(options.largest)
    except ValueError as error:
        problems.append(str(error))
    key = os.environ.pop(options.key_variable, "")
    if len(key) < SHORTEST_KEY:
        problems.append(
            f"the environment variable {options.key_variable} has {len(key)} characters; expected a key of "
            f"at least {SHORTEST_KEY}, such as that of `openssl rand -hex 32`"
        )
    if options.most < 1:
        problems.append(f"--most {options.most}: expected at least 1")
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    readable = tuple(options.readable)
    server = SandboxServer(key, options.most, largest, readable, not options.allow_weak_isolation)
    try:
        asyncio.run(_serve(server, options.host, options.port))
    except OSError as error:
        print(f"{options.host}:{options.port} cannot be listened on: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(interrupts.attended(main))
