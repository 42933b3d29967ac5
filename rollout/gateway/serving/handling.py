"""Takes requests of users: who may ask, how much, and which endpoint answers. No SGLang in here.

    request ─► key ─► rate ─► body ─► fields ─► capacity ─► endpoint ─► first token ─► reply
               401    429   408, 413   400         503        400          400, 503

Every refusal comes before the first byte of a reply, and none waits for an engine.
"""

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from functools import partial

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from slipstream.configs.schema import LimitsConfig
from slipstream.rollout.gateway import naming
from slipstream.rollout.gateway.conversations import (
    Arrival,
    KeyRing,
    NamedAnswer,
    UnknownTurn,
    User,
)
from slipstream.rollout.gateway.helpers import TurnTypes
from slipstream.rollout.gateway.naming import checked_name, key_of, request_of
from slipstream.rollout.gateway.serving import replies
from slipstream.rollout.gateway.serving.call import FULL_AGAIN_S, LiveCall, SharedParts
from slipstream.rollout.gateway.serving.limits import Rates, Refusal
from slipstream.rollout.gateway.serving.metrics import ServingMetrics
from slipstream.rollout.gateway.serving.replies import ClientGone, EventStream, Result, unless_disconnected
from slipstream.rollout.gateway.serving.schema import Endpoint
from slipstream.rollout.gateway.serving.traces import RequestSpan, Traces
from slipstream.rollout.gateway.serving.words import UNKNOWN_RESPONSE, Protocols, words_of
from slipstream.rollout.gateway.serving.workers import INLINE_BYTES, KeyTurn
from slipstream.rollout.gateway.source import TokenSource
from slipstream.rollout.system.steady_clock import steady_s
from slipstream.rollout.tokens.turn_entries import TurnType


def arrival_of(
    user: User,
    *,
    endpoint: str,
    path_session: str | None,
    response_session: str | None,
    headers: Mapping[str, str],
    body: Mapping[str, object],
    raw: bytes,
    now_s: float,
    request: str = "",
    previous: str = "",
    types: TurnTypes | None = None,
) -> Arrival:
    """Return what a request says about itself, without a prompt. Raises Refusal with 400.

    ``path_session``: the session in the URL. ``response_session``: the session of the response that the
    request names as the previous one. ``types``: gives types to turns whose requests do not say; None:
    nothing does.
    """
    try:
        session = naming.session_name(path_session, headers, body) or response_session or user.session
        client_session = naming.client_session(headers)
        turn_type, typed = naming.turn_type(headers, body), None
        ends_session = naming.session_done(headers, body)
    except ValueError as error:
        raise Refusal(400, str(error)) from error
    if turn_type is None and types is not None:
        typed = types.of(user.name, headers, body)
    return Arrival(
        user=user,
        session=session,
        client_session=client_session,
        turn_type=turn_type if typed is None else typed.turn_type,
        side_reason=typed.reason if typed is not None and typed.turn_type is TurnType.SIDE else "",
        ends_session=ends_session,
        digest=hashlib.blake2b(
            f"{endpoint}\n{session or client_session}\n".encode() + raw, digest_size=16
        ).digest(),
        retries=naming.retries(headers),
        arrived_s=now_s,
        request=request,
        previous=previous,
    )


log = logging.getLogger(__name__)


class RequestHandler:
    """Takes requests in, and sees to it that each turn it begins is left again."""

    def __init__(
        self,
        *,
        shared: SharedParts,
        source: TokenSource,
        keys: KeyRing,
        limits: LimitsConfig,
        metrics: ServingMetrics,
        clock: Callable[[], float] = steady_s,
        types: TurnTypes | None = None,
        log_content: bool = False,
        aborts_all: bool = False,
        traces: Traces | None = None,
    ) -> None:
        """``aborts_all``: a key names one client, which may abort all of its requests at once. ``traces``:
        takes a span of each request for answers that has a valid key; None: nothing does.
        """
        self._shared = shared
        self._source = source
        self._keys = keys
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._types = types
        self._log_content = log_content
        self._aborts_all = aborts_all
        self._traces = traces
        self._rates = Rates(limits.requests_per_minute, time.monotonic)
        self._tokens = Rates(limits.tokens_per_minute, time.monotonic, unit="tokens")
        self._calls: dict[LiveCall, str] = {}
        """Requests that run, and the names of their users."""

    def user(self, request: Request) -> User:
        """Return who sends a request. Raises Refusal with 401."""
        user = self._keys.user(key_of(request.headers))
        if user is None:
            raise Refusal(401, "this request has no valid key (Authorization: Bearer KEY)")
        return user

    async def own_body(self, request: Request) -> tuple[User, bytes]:
        """Return who sends a request to an endpoint of the gateway's own, and its body. Raises Refusal."""
        user = self.user(request)
        self._rates.take(user.name)
        return user, await read_body(request, self._limits.body_bytes)

    async def take(self, endpoint: Endpoint, request: Request) -> Response:
        """Answer a request."""
        status, error, span = 500, "server_error", None
        is_streamed = False
        try:
            user = self.user(request)
            span = self._begun(endpoint, request)
            reply = await self._answer(endpoint, request, user, span)
            status, error = reply.status_code, ""
            is_streamed = isinstance(reply, EventStream)  # which ends its span at its own end
            return reply
        except Refusal as refused:
            status, error = words_of(refused, endpoint.protocol).status, _error(refused, endpoint.protocol)
            # The errors before it and their frames refer to each other, and would keep the request in memory
            # until Python looks for garbage.
            refused.__cause__ = refused.__context__ = refused.__traceback__ = None
            return replies.error_reply(refused, endpoint.protocol)
        except (ClientGone, ClientDisconnect):
            status, error = 499, GONE
            self._metrics.disconnects.labels(endpoint.name).inc()
            return Response(status_code=status)
        finally:
            self._metrics.requests.labels(endpoint.name, str(status)).inc()
            if not is_streamed:
                self._end_span(span, error)

    def _begun(self, endpoint: Endpoint, request: Request) -> RequestSpan | None:
        if self._traces is None or not endpoint.generates:
            return None
        return self._traces.begin(endpoint.name, request.headers)

    def _end_span(self, span: RequestSpan | None, error: str) -> None:
        if self._traces is not None and span is not None:
            self._traces.end(span, error)

    async def _answer(
        self, endpoint: Endpoint, request: Request, user: User, span: RequestSpan | None
    ) -> Response:
        now_s = self._clock()
        self._rates.take(user.name)
        raw = await read_body(request, self._limits.body_bytes)
        if len(raw) <= INLINE_BYTES:
            return await self._answer_body(endpoint, request, user, raw, None, span, now_s)
        turn = self._shared.workers.turn(user.name)
        try:
            await unless_disconnected(request.receive, turn.taken(len(raw)))
            return await self._answer_body(endpoint, request, user, raw, turn, span, now_s)
        finally:
            turn.give_up()

    async def _answer_body(
        self,
        endpoint: Endpoint,
        request: Request,
        user: User,
        raw: bytes,
        turn: KeyTurn | None,
        span: RequestSpan | None,
        now_s: float,
    ) -> Response:
        """Answer a request that has come at ``now_s``, and whose ``turn`` it is, if it is long."""
        body = _json(raw)
        if self._traces is not None and span is not None:
            self._traces.asked(span, body)
        if self._log_content:
            log.info("%s %s: %s", user.name, endpoint.name, raw.decode(errors="replace"))
        read = endpoint.read(body, self._limits)
        self._metrics.count_read(read)
        previous, session = self._previous(user, body)
        arrival = arrival_of(
            user,
            endpoint=endpoint.name,
            path_session=path_session(request),
            response_session=session,
            headers=request.headers,
            body=body,
            raw=raw,
            now_s=now_s,
            request=self._shared.mint(),
            previous=previous,
            types=self._types,
        )
        if endpoint.generates:
            self._tokens.check(user.name)
            self._check_capacity()
        call = LiveCall(self._shared, arrival, body, turn, read.tools)
        self._calls[call] = user.name
        is_streamed = False
        try:
            result = await unless_disconnected(request.receive, self._ask(endpoint, call, read.request))
            if isinstance(result, AsyncIterator):
                self._metrics.first_token_s.labels(endpoint.name).observe(self._clock() - now_s)
                if self._traces is not None and span is not None:
                    self._traces.first_chunk(span)
            reply = self._reply(endpoint, call, result, span)
            is_streamed = isinstance(reply, EventStream)  # which leaves its turns at its own end
            return reply
        except Refusal as refused:
            refused.in_stream = bool(body.get("stream"))
            raise
        finally:
            if not is_streamed:
                await self._end(call, span)

    async def _ask(self, endpoint: Endpoint, call: LiveCall, parsed: object) -> Result:
        """Return the reply, or the events of one whose first tokens have come. Raises Refusal."""
        try:
            result = await endpoint.answer(call, parsed)
        except Exception as error:
            if call.refusal is None:
                raise
            raise call.refusal from error
        if call.refusal is not None:
            raise call.refusal
        if isinstance(result, AsyncIterator):
            await call.started()
        return result

    def _reply(
        self, endpoint: Endpoint, call: LiveCall, result: Result, span: RequestSpan | None
    ) -> Response:
        headers = {
            "x-request-id": call.answer_id,
            **replies.session_headers(call.session),
            **call.tools.headers,
        }
        if isinstance(result, AsyncIterator):
            return EventStream(
                result if endpoint.protocol is not Protocols.ANTHROPIC else _with_id(result, call.answer_id),
                session=call.session,
                headers=headers,
                protocol=endpoint.protocol,
                close=partial(self._left, endpoint, call, span),
            )
        if call.session is not None:
            if endpoint.protocol is Protocols.ANTHROPIC and isinstance(result, dict):
                result["id"] = MESSAGE + call.answer_id
            parts = result if isinstance(result, list) else [result]
            for part in parts:
                part["session_id"] = call.session
        return replies.json_reply(result, headers=headers)

    async def _left(self, endpoint: Endpoint, call: LiveCall, span: RequestSpan | None) -> None:
        error = "" if call.refusal is None else _error(call.refusal, endpoint.protocol)
        if any(answer.recorded is None for answer in call.answers):
            self._metrics.disconnects.labels(endpoint.name).inc()
            error = error or GONE
        try:
            await self._end(call, span)
        finally:
            self._end_span(span, error)

    async def _end(self, call: LiveCall, span: RequestSpan | None) -> None:
        self._tokens.charge(self._calls.pop(call), call.tokens)
        self._metrics.count_ignored(call.ignored)
        try:
            if self._traces is not None and span is not None:
                self._traces.answered(span, call)
        finally:
            await call.end()

    def _check_capacity(self) -> None:
        """Raises Refusal with 503 if nothing can be generated now."""
        retry_after_s = self._source.retry_after_s()
        if retry_after_s is None and self._shared.turns.answers >= self._limits.concurrent:
            retry_after_s = FULL_AGAIN_S
        if retry_after_s is not None:
            raise Refusal(503, "no engine is free", retry_after_s=retry_after_s)

    # ---- answers that are named later

    def _previous(self, user: User, body: dict[str, object]) -> tuple[str, str | None]:
        """Return the request whose answer a request continues by name, and its session.

        Empty and None: it names none. Raises Refusal with 404.
        """
        previous = body.get("previous_response_id")
        if previous is None:
            return "", None
        request, answer = self._named(user, previous)
        if answer is None:
            raise Refusal(
                404,
                f"Previous response with id {previous!r} not found.",
                param="previous_response_id",
                code=UNKNOWN_RESPONSE,
            )
        return request, answer.session

    def _named(self, user: User, response: object) -> tuple[str, NamedAnswer | None]:
        """Return the request of a response, and the answer to it if this user can name it."""
        if not isinstance(response, str) or not response.startswith(RESPONSE):
            return "", None
        request = response.removeprefix(RESPONSE)
        return request, self._shared.conversations.answer_of(user, request)

    async def response(self, request: Request) -> Response:
        """Return a response as the client has got it."""
        user = self.user(request)
        self._rates.take(user.name)
        session = path_session(request)
        _, answer = self._named(user, request.path_params["response"])
        if answer is None or session not in (None, answer.session):
            raise Refusal(404, "no such response", param="response_id")
        try:
            [turn] = await self._shared.entries.turns([answer.turn])
        except UnknownTurn as error:
            raise Refusal(404, f"no such response: {error}", param="response_id") from error
        content = orjson.loads(bytes(turn.exchange))["response"] | {"session_id": answer.session}
        return replies.json_reply(content, headers=replies.session_headers(answer.session))

    # ---- aborts

    async def abort(self, request: Request) -> Response:
        """End the answers of a request of the same user where they are, as SGLang's /abort_request does."""
        user = self.user(request)
        body = _json(await read_body(request, self._limits.body_bytes))
        rid, calls = body.get("rid"), [call for call, owner in self._calls.items() if owner == user.name]
        if body.get("abort_all"):
            if not self._aborts_all:
                raise Refusal(400, "clients may not set abort_all: name each request", param="abort_all")
        elif not isinstance(rid, str) or not rid:
            raise Refusal(400, "rid: expected the id of a request or of its answer", param="rid")
        else:
            calls = [call for call in calls if request_of(rid) in (call.id, call.answer_id)]
        return replies.json_reply({"aborted": sum(call.abort() for call in calls)})


MESSAGE = "msg_"
"""Beginning of the id of a message. SGLang makes up what follows; here it is the id of the request, by which
rewards name the answer."""

MESSAGE_ID = re.compile(r'"id":\s*"msg_[0-9a-f]+"')


async def _with_id(events: AsyncIterator[str | bytes], request: str) -> AsyncGenerator[str]:
    """Yield the events of a message, whose id is that of its request."""
    is_named = False
    try:
        async for event in events:
            text = event.decode() if isinstance(event, bytes) else event
            if not is_named and text.startswith("event: message_start\n"):
                text, is_named = MESSAGE_ID.sub(f'"id":"{MESSAGE}{request}"', text, count=1), True
            yield text
    finally:
        if isinstance(events, AsyncGenerator):
            await events.aclose()


RESPONSE = "resp_"
"""Beginning of the id of a response. The id of its request follows."""


def path_session(request: Request) -> str | None:
    """Return the session in the path of a request; None: there is none. Raises Refusal with 400."""
    try:
        return checked_name("the path", request.path_params.get("session"))
    except ValueError as error:
        raise Refusal(400, str(error)) from error


GONE = "client_gone"
"""Error of a request whose client has gone before the end."""


def _error(refused: Refusal, protocol: Protocols) -> str:
    """Return what the client gets as the code of an error, or else as its type."""
    words = words_of(refused, protocol)
    return words.code or words.type


def _json(raw: bytes) -> dict[str, object]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(400, "expected a JSON object as the body")
    return body


BODY_S = 50.0
"""Longest time that a body may take. Its connection is closed 10 s later (``port.BODY_S``)."""


async def read_body(request: Request, limit: int, *, within_s: float = BODY_S) -> bytes:
    """Return the body of a request. Raises Refusal with 413 before more than ``limit`` bytes are read, and
    with 408 if the body does not come ``within_s`` seconds."""
    try:
        async with asyncio.timeout(within_s):
            return await _read(request, limit)
    except TimeoutError:
        raise Refusal(408, f"the body has not come within {within_s:g} s") from None


async def _read(request: Request, limit: int) -> bytes:
    too_long = Refusal(413, f"the body is longer than {limit} bytes")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > limit:
        raise too_long
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_long
        parts.append(part)
    return b"".join(parts)
