"""Sends replies: errors in the words of each protocol, answers with their session, streams that end early
when their client goes. Knows Starlette, not SGLang.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.rollout.gateway.naming import SESSION_HEADER
from slipstream.rollout.gateway.serving.limits import Refusal
from slipstream.rollout.gateway.serving.words import TOO_LONG, Protocols, error_body, words_of

log = logging.getLogger(__name__)

T = TypeVar("T")

Result = dict[str, Any] | list[dict[str, Any]] | AsyncIterator[str | bytes]
"""A reply as JSON, or the events of a stream."""


def error_reply(refused: Refusal, protocol: Protocols) -> Response:
    """Return the reply to a request that is refused."""
    if refused.in_stream and protocol is Protocols.RESPONSES and refused.code == TOO_LONG:
        # OpenAI begins the stream before it counts. Codex compacts after this event only.
        events = "".join(_failed_response(refused))
        return Response(events, headers=refused.headers, media_type="text/event-stream")
    status = words_of(refused, protocol).status
    return json_reply(error_body(refused, protocol), status=status, headers=refused.headers)


def _failed_response(refused: Refusal) -> Iterator[str]:
    """Yield the events of a response that fails before its first token."""
    error = cast("dict[str, object]", error_body(refused, Protocols.RESPONSES)["error"])
    response: dict[str, object] = {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": "",
        "output": [],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }
    failed = {"status": "failed", "error": {"code": error["code"], "message": error["message"]}}
    events: list[tuple[str, dict[str, object]]] = [
        ("response.created", {"response": response}),
        ("response.in_progress", {"response": response}),
        ("error", {"error": error}),
        ("response.failed", {"response": response | failed}),
    ]
    for number, (kind, fields) in enumerate(events):
        data = orjson.dumps({"type": kind, "sequence_number": number, **fields}).decode()
        yield f"event: {kind}\ndata: {data}\n\n"


def json_reply(content: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS),
        status_code=status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


def session_headers(session: str | None) -> dict[str, str]:
    """Return the header that names the session."""
    return {} if session is None else {SESSION_HEADER: session}


def with_session(event: str, session: str | None) -> str:
    """Return a server-sent event whose JSON object names the session as well."""
    if session is None:
        return event
    named = f'{{"session_id":{orjson.dumps(session).decode()},'
    event = event.replace("data: {", f"data: {named}", 1)
    for kind, field in _WHOLES:
        if event.startswith(kind):
            return event.replace(f'"{field}":{{', f'"{field}":{named}', 1)
    return event


_WHOLES = (
    *((f"event: response.{kind}\n", "response") for kind in ("created", "completed", "incomplete", "failed")),
    ("event: message_start\n", "message"),
)
"""Events with a whole answer, and the field that holds it: clients hand that on without the event."""


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone. The body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        """A part of a body that has been read completely: there is none."""


class ClientGone(Exception):
    """Nobody waits for the reply any more."""


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Return what ``work`` returns; cancel it and raise ClientGone if the client goes before."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return await working
    finally:
        await _cancel(working, watching)


async def _cancel(*futures: asyncio.Future[Any]) -> None:
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, until they end or the client goes. ``close`` is called in both cases."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[str | bytes],
        *,
        session: str | None,
        headers: Mapping[str, str],
        protocol: Protocols,
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self._events = events
        self._session = session
        self._protocol = protocol
        self._close = close
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        watching = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(sending, watching)
            try:
                if isinstance(self._events, AsyncGenerator):
                    await self._events.aclose()
            finally:
                await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._guarded():
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _guarded(self) -> AsyncIterator[str]:
        """Yield the events with their session. A failure is an event, too: the status has left already."""
        try:
            async for event in self._events:
                yield with_session(event.decode() if isinstance(event, bytes) else event, self._session)
        except Exception as error:
            log.exception("a stream has failed", exc_info=error)
            body = error_body(Refusal(500, "the answer cannot be finished"), self._protocol)
            name = "event: error\n" if self._protocol is Protocols.ANTHROPIC else ""
            yield f"{name}data: {orjson.dumps(body).decode()}\n\n"
