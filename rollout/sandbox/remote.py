"""A sandbox on another machine, reached through a server of `protocol.py`."""

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import aiohttp
import msgspec

from slipstream.configs.schema.sandbox import RemoteSandboxConfig, SandboxLimits
from slipstream.rollout.sandbox.interface import ExecResult, Isolation, SandboxFailed, SandboxRefused
from slipstream.rollout.sandbox.local import CLOSE_S, checked_bytes, checked_call, checked_path
from slipstream.rollout.sandbox.protocol import FULL, REFUSED, CreateBody, CreatedBody, ErrorBody, ExecBody

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""Seconds between two attempts, which double."""

_MOST_PER_CHARACTER = 6
"""Bytes of JSON for a byte of output, at most: ``\\u0000``."""

_R = TypeVar("_R")


class RemoteSandbox:
    """A ``Sandbox`` that is used over HTTP.

    A request that may be done twice is repeated when the connection fails. A command is repeated only if the
    server could not be reached at all: otherwise the command could run twice.
    """

    def __init__(self, settings: RemoteSandboxConfig) -> None:
        """Raise SandboxFailed if the environment has no key."""
        key = os.environ.get(settings.key_variable)
        if not key:
            raise SandboxFailed(
                f"the environment variable {settings.key_variable} is not set; expected the key of "
                f"{settings.url} in it (sandbox.key_variable)"
            )
        self._settings = settings
        self._url = f"{settings.url.rstrip('/')}/sandboxes/{secrets.token_hex(16)}"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._session: aiohttp.ClientSession | None = None
        self._turn = asyncio.Lock()
        self._is_closed = False
        self.isolation: Isolation | None = None
        """How far commands are kept from the server's machine; None before ``create``."""

    async def create(self) -> Isolation:
        """Make the sandbox. Raises SandboxFailed."""
        if self._session is not None or self._is_closed:
            raise SandboxFailed("the sandbox was created before")
        self._session = aiohttp.ClientSession(headers=self._headers)
        limits = self._settings.model_dump(include=set(SandboxLimits.model_fields))
        body = msgspec.json.encode(CreateBody(limits, self._settings.idle_s))
        try:
            reply = await self._ask("PUT", "", body, self._settings.create_timeout_s, is_repeatable=True)
        except SandboxRefused as error:  # the server's limits are lower
            await self.close()
            raise SandboxFailed(str(error)) from error
        created = self._decoded(reply, CreatedBody)
        self.isolation = Isolation(created.level, created.reason)
        if self._settings.require_isolation and created.level != "namespaces":
            await self.close()
            raise SandboxFailed(
                f"{self._settings.url} has the isolation {created.level!r} ({created.reason}); "
                "expected 'namespaces' (sandbox.require_isolation)"
            )
        return self.isolation

    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        wall_s: float | None = None,
    ) -> ExecResult:
        """Run a command and wait for its end, see ``Sandbox.exec``."""
        parts, variables = checked_call(command, stdin, env, wall_s)
        body = msgspec.json.encode(ExecBody(list(parts), bytes(stdin), variables, wall_s))
        limit = self._settings.wall_s
        seconds = (limit if wall_s is None else min(limit, wall_s)) + self._settings.answer_timeout_s
        reply = await self._ask("POST", "/exec", body, seconds, is_repeatable=False)
        return self._decoded(reply, ExecResult)

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file, see ``Sandbox.upload``."""
        path, data = checked_path(path), checked_bytes(data)
        seconds = self._settings.answer_timeout_s
        await self._ask("PUT", "/files", data, seconds, is_repeatable=True, path=path)

    async def download(self, path: str) -> bytes:
        """Return a file, see ``Sandbox.download``."""
        seconds = self._settings.answer_timeout_s
        return await self._ask("GET", "/files", b"", seconds, is_repeatable=True, path=checked_path(path))

    async def close(self) -> None:
        """End the sandbox. A server that cannot be reached does so after ``idle_s``."""
        if self._session is None:
            return
        if not self._is_closed:
            self._is_closed = True
            with suppress(aiohttp.ClientError, TimeoutError, SandboxFailed):
                async with asyncio.timeout(CLOSE_S):
                    await self._attempt("DELETE", "", b"", None)
        await self._session.close()

    # -- HTTP

    async def _ask(
        self,
        method: str,
        resource: str,
        body: bytes,
        seconds: float,
        *,
        is_repeatable: bool,
        path: str | None = None,
    ) -> bytes:
        """Send a request until it is answered, for ``seconds``. Raises SandboxRefused, SandboxFailed."""
        async with self._turn:
            if self._session is None or self._is_closed:
                raise SandboxFailed(
                    "the sandbox is closed" if self._is_closed else "the sandbox is not created"
                )
            query = None if path is None else {"path": path}
            try:
                async with asyncio.timeout(seconds):
                    return await self._attempts(method, resource, body, query, is_repeatable)
            except TimeoutError as error:
                await self._give_up()
                what = f"{method} {self._url}{resource}"
                raise SandboxFailed(f"{what} was not answered in {seconds:g} s") from error
            except asyncio.CancelledError:
                await self._give_up()
                raise

    async def _attempts(
        self, method: str, resource: str, body: bytes, query: dict[str, str] | None, is_repeatable: bool
    ) -> bytes:
        pause = FIRST_PAUSE_S
        while True:
            try:
                status, reply = await self._attempt(method, resource, body, query)
            except aiohttp.ClientConnectorError:
                """The server has not got the request: it may be restarting."""
            except aiohttp.ClientError as error:
                if not is_repeatable:
                    raise SandboxFailed(f"{method} {self._url}{resource} broke off: {error!r}") from error
            else:
                if status < 300:
                    return reply
                if status != FULL:
                    raise self._error(status, reply)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _attempt(
        self, method: str, resource: str, body: bytes, query: dict[str, str] | None
    ) -> tuple[int, bytes]:
        assert self._session is not None
        most = max(
            self._settings.file_mb << 20, 2 * _MOST_PER_CHARACTER * (self._settings.output_kb << 10)
        ) + (1 << 16)
        timeout = aiohttp.ClientTimeout(total=None)
        url = self._url + resource
        async with self._session.request(method, url, data=body, params=query, timeout=timeout) as response:
            reply = bytearray()
            async for part in response.content.iter_any():
                reply += part
                if len(reply) > most:
                    raise SandboxFailed(f"{self._url} answers with more than {most} bytes")
            return response.status, bytes(reply)

    def _error(self, status: int, reply: bytes) -> Exception:
        try:
            text = msgspec.json.decode(reply, type=ErrorBody).error
        except msgspec.MsgspecError:
            text = reply[:500].decode(errors="replace")
        if status == REFUSED:
            return SandboxRefused(text)
        return SandboxFailed(f"{self._settings.url} answers with status {status}: {text}")

    def _decoded(self, reply: bytes, kind: type[_R]) -> _R:
        try:
            return msgspec.json.decode(reply, type=kind)
        except msgspec.MsgspecError as error:
            raise SandboxFailed(f"{self._settings.url} answers with no {kind.__name__}: {error}") from error

    async def _give_up(self) -> None:
        """Close the connection, by which the server sees that nobody waits."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()
