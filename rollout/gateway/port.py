"""One port on which a process serves an application over HTTP."""

import asyncio
import socket
from contextlib import AbstractContextManager, nullcontext

import uvicorn

from slipstream.rollout.system.key import Application

KEEP_ALIVE_S = 75
"""Time for which an idle connection of a user stays open. Clients and balancers of load give theirs up after
5 to 60 s: a request on a connection that the other end is just closing fails, though nothing is wrong."""


class PortServer(uvicorn.Server):
    """One port of a process. Leaves signals alone, and logs no request."""

    def __init__(self, application: Application, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                application,  # pyright: ignore[reportArgumentType]  # uvicorn's own types are narrower
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
