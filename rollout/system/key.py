"""The key of one server: a request without it is refused before any part of the server sees it.

SGLang's own check (``ServerArgs.api_key``) lets every request pass whose path begins with /health, /ready or
/metrics (/health_generate generates), and every OPTIONS request and WebSocket. ``KeyRequired`` encloses it.
"""

import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""


class Key(str):
    """A secret that its ``repr`` hides, and with it every log and error that shows what holds the key."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'<hidden>'" if self else "''"

    @property
    def header(self) -> str:
        """Value of the header ``Authorization`` of a request."""
        return f"Bearer {self}"


NO_KEY = Key()
"""Key of a server that asks for none."""


def new_key() -> Key:
    """Return a random key of 256 bits."""
    return Key(secrets.token_urlsafe(32))


class KeyRequired:
    """An ASGI application that passes on requests with the key, and answers others with 401."""

    def __init__(self, application: Application, key: Key) -> None:
        if not key:
            raise ValueError("an empty key protects nothing")
        self._application = application
        self._expected = key.header.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._has_key(scope):
            await self._application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: HTTP 403
        else:
            await _refuse(send)

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def _refuse(send: Send) -> None:
    body = json.dumps({"error": "this request has no valid key (Authorization: Bearer KEY)"}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
        (b"connection", b"close"),  # else the server would go on reading the body
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
