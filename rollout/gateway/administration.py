"""The requests of the operator of a gateway process, over HTTP on loopback.

    POST /forget {"session": ..., "key": ...}    remove a session, those of a key, or the session of a key

The request needs the secret that the processes of the run share, as all requests do that change something.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from slipstream.rollout.system.key import Application, Key, KeyRequired, Receive, Scope, Send
from slipstream.rollout.tokens.turn_entries import Entry

FORGET = "/forget"

LONGEST_BODY = 65_536
"""Bytes."""

Forget = Callable[[str | None, str | None], Sequence[Entry]]
"""Drops the sessions, and returns what is to be recorded of that."""


class Administration:
    """An ASGI application: figures for everybody on loopback, and changes for owners of the key."""

    def __init__(
        self,
        figures: Application,
        forget: Forget,
        record: Callable[[Sequence[Entry]], Awaitable[None]],
        key: Key,
    ) -> None:
        """``record``: has entries written, and returns when they are durable."""
        self._figures = figures
        self._forget = forget
        self._record = record
        self._protected = KeyRequired(self._forgetting, key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_protected = scope["type"] == "http" and scope["path"] == FORGET
        await (self._protected if is_protected else self._figures)(scope, receive, send)

    async def _forgetting(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = _names(await _body(receive)) if scope["method"] == "POST" else None
        if names is None or names == (None, None):
            await _reply(send, 400, {"error": 'expected POST {"session": TEXT, "key": TEXT}, or one of them'})
            return
        await self._record(self._forget(*names))
        await _reply(send, 200, {"session": names[0], "key": names[1]})


async def _body(receive: Receive) -> bytes:
    body = b""
    while len(body) <= LONGEST_BODY:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    return body


def _names(body: bytes) -> tuple[str | None, str | None] | None:
    """Return session and key of a request; None: it is malformed."""
    try:
        values = json.loads(body)
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    fields = cast("dict[str, object]", values)
    names = tuple(fields.get(name) for name in ("session", "key"))
    if any(name is not None and (not isinstance(name, str) or not name) for name in names):
        return None
    return cast("tuple[str | None, str | None]", names)


async def _reply(send: Send, status: int, values: object) -> None:
    body = json.dumps(values).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
