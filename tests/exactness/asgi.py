"""A client of an ASGI application in the same process: streams, and goes when it wants to."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

TIMEOUT_S = 60.0


class Exchange:
    """One request, and the reply as it comes.

    async with Exchange(app, "/v1/...", body, headers) as exchange:
        status = await exchange.started()
        async for part in exchange.parts(): ...
    """

    def __init__(
        self,
        app: Any,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        method: str = "POST",
    ) -> None:
        self._app = app
        self._body = b"" if body is None else json.dumps(body).encode()
        values = {"content-type": "application/json", "content-length": str(len(self._body)), **headers}
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in values.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self._is_sent = False
        self._gone = asyncio.Event()
        self._messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_whole = False
        """The reply has come to its end."""

    async def __aenter__(self) -> "Exchange":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._gone.set()
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.wait({self._task})
        if not exc[0]:
            await self._task

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            self._messages.put_nowait(None)

    async def _receive(self) -> dict[str, Any]:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if not self._gone.is_set():
            self._messages.put_nowait(message)

    async def started(self) -> int:
        """Wait for the status; 0: there is none."""
        async with asyncio.timeout(TIMEOUT_S):
            message = await self._messages.get()
        if message is not None:
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        return self.status

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body."""
        while True:
            async with asyncio.timeout(TIMEOUT_S):
                message = await self._messages.get()
            if message is None:
                return
            if message["body"]:
                yield message["body"]
            if not message.get("more_body"):
                self.is_whole = True
                return

    async def body(self) -> bytes:
        """Return the whole body."""
        return b"".join([part async for part in self.parts()])

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the JSON of each server-sent event."""
    events: list[dict[str, Any]] = []
    for line in text.split("\n"):
        if line.startswith("data: ") and line != "data: [DONE]":
            with suppress(ValueError):
                events.append(json.loads(line[6:]))
    return events
