"""One port on which a process serves an application over HTTP.

    connected ──request begins──► headers ──► body ──► answered ──► rests
        └────── HEAD_S ──────────────┘  └ BODY_S ┘        └── KEEP_ALIVE_S

Whoever connects needs no key before the headers have come. So a connection that waits for the rest of a
request is closed in time, and gives its place up to a new one when all are taken: strangers cannot take all
descriptors.
"""

import asyncio
import socket
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slipstream.rollout.system.key import Application

KEEP_ALIVE_S = 75
"""Time for which an idle connection of a user stays open. Clients and balancers of load give theirs up after
5 to 60 s: a request on a connection that the other end is just closing fails, though nothing is wrong."""


HEAD_S, BODY_S = 15.0, 60.0
"""Longest time from the beginning of a connection, or of a further request, to the end of its headers, and
from there to the end of its body, in seconds."""


class Places:
    """The connections of a port, of which those that wait for a request give their places up to new ones.

    The address with the most of them gives up its oldest one. So a user who connects from elsewhere, or sends
    a request at once, is not driven out by somebody with a thousand connections.
    """

    def __init__(self, most: int | None) -> None:
        """``most``: number of connections; None: no limit."""
        self._most = most
        self._waiting: dict[str, dict[_Connection, None]] = {}
        """By address, the oldest first."""
        self._count = 0

    def take(self, connection: "_Connection") -> None:
        self._count += 1
        if self._most is not None and self._count > self._most:
            crowd = max(self._waiting.values(), key=len, default={connection: None})
            next(iter(crowd)).close()
        self.wait(connection)

    def leave(self, connection: "_Connection") -> None:
        self._count -= 1
        self.go_on(connection)

    def wait(self, connection: "_Connection") -> None:
        """Note that no whole request of a connection has come."""
        self._waiting.setdefault(connection.address, {})[connection] = None

    def go_on(self, connection: "_Connection") -> None:
        """Note that a request of a connection is answered, or that it has ended."""
        here = self._waiting.get(connection.address, {})
        here.pop(connection, None)
        if not here:
            self._waiting.pop(connection.address, None)


class _Connection(HttpToolsProtocol):
    def __init__(self, places: Places, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._places = places
        self._deadline: asyncio.TimerHandle | None = None
        self.address = ""

    def close(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._must_go_on_within(HEAD_S)
        self._places.take(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._must_go_on_within(None)
        self._places.leave(self)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:
            self._must_go_on_within(HEAD_S)

    def on_headers_complete(self) -> None:
        self._must_go_on_within(BODY_S)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._must_go_on_within(None)
        self._places.go_on(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._places.wait(self)
        super().on_response_complete()

    def _must_go_on_within(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.close)


class PortServer(uvicorn.Server):
    """One port of a process. Leaves signals alone, and logs no request."""

    def __init__(
        self, application: Application, listener: socket.socket, *, most_connections: int | None = None
    ) -> None:
        """``most_connections``: number of connections at one time; None: no limit."""
        super().__init__(
            uvicorn.Config(
                application,  # pyright: ignore[reportArgumentType]  # uvicorn's own types are narrower
                http=partial(_Connection, Places(most_connections)),  # pyright: ignore[reportArgumentType]
                interface="asgi3",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._listener = listener
        self.is_listening = asyncio.Event()
        self.has_ended = asyncio.Event()

    def capture_signals(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve([self._listener])
        finally:
            self.has_ended.set()
            self.is_listening.set()  # nobody must wait for a server that has failed

    def close(self) -> None:
        self._listener.close()
