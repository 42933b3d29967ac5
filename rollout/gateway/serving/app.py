"""Makes the applications of a gateway process: for users, and for its operator. No SGLang in here."""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.rollout.gateway.naming import credentials_of
from slipstream.rollout.gateway.serving import replies
from slipstream.rollout.gateway.serving.handling import RequestHandler
from slipstream.rollout.gateway.serving.limits import Refusal
from slipstream.rollout.gateway.serving.metrics import ServingMetrics
from slipstream.rollout.gateway.serving.schema import Endpoint, describe
from slipstream.rollout.gateway.serving.session_routes import SessionRoutes
from slipstream.rollout.gateway.serving.words import UNKNOWN_MODEL, Protocols, protocol_of
from slipstream.rollout.gateway.source import TokenSource


@dataclass(frozen=True)
class ModelCard:
    """Description of the model for clients."""

    name: str
    path: str
    context: int
    created_s: int


def create_app(
    handler: RequestHandler,
    sessions: SessionRoutes,
    endpoints: Sequence[Endpoint],
    card: ModelCard,
    *,
    source: TokenSource,
    metrics: ServingMetrics,
    answers: Callable[[], int],
) -> FastAPI:
    """Return the application for users."""
    app = _application("Slipstream gateway")
    for endpoint in endpoints:
        _add(app, "POST", endpoint.path, partial(handler.take, endpoint))
    for method, path, take in (
        ("POST", "/rewards", sessions.reward),
        ("POST", "/sessions", sessions.open),
        ("GET", "/sessions", sessions.list_all),
        ("GET", "/sessions/{session}", sessions.list_one),
        ("DELETE", "/sessions/{session}", sessions.forget),
        ("POST", "/sessions/{session}/reward", sessions.reward_turn),
        ("POST", "/abort_request", handler.abort),
        ("GET", "/v1/responses/{response}", handler.response),
    ):
        _add(app, method, path, _refusing(take))
    _add_state(app, handler, card, source, metrics, answers)
    app.openapi = lambda: describe(get_openapi(title=app.title, version="1", routes=app.routes), endpoints)
    return app


def _application(title: str) -> FastAPI:
    app = FastAPI(title=title, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(HTTPException, _http_error)  # pyright: ignore[reportArgumentType]
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(HeadAsGet)
    return app


class DirectRoute(APIRoute):
    """Gives its endpoint the request and nothing else, in which FastAPI would look for parameters."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


class HeadAsGet:
    """Answers HEAD as GET. The server leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)


def _add(app: FastAPI, method: str, path: str, take: Callable[[Request], Awaitable[Response]]) -> None:
    """Add a route. What is below /v1 is below the path of a session as well."""

    async def route(request: Request) -> Response:
        return await take(request)

    for prefix in ("", "/sessions/{session}") if path.startswith("/v1/") else ("",):
        app.router.add_api_route(
            prefix + path,
            route,
            methods=[method],
            name=prefix + path,
            response_class=Response,
            route_class_override=DirectRoute,
        )


def _refusing(take: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Return a route that tells the client of refusals."""

    async def route(request: Request) -> Response:
        try:
            return await take(request)
        except Refusal as refused:
            return replies.error_reply(refused, _protocol(request))
        except ClientDisconnect:
            return Response(status_code=499)

    return route


def _add_state(
    app: FastAPI,
    handler: RequestHandler,
    card: ModelCard,
    source: TokenSource,
    metrics: ServingMetrics,
    answers: Callable[[], int],
) -> None:
    model = {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "slipstream",
        "type": "model",  # this and the next two are Anthropic's
        "display_name": card.name,
        "created_at": datetime.fromtimestamp(card.created_s, UTC).isoformat(),
        "max_model_len": card.context,
    }

    def known(build: Callable[[Request], object]) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            handler.user(request)
            built = build(request)
            return built if isinstance(built, Response) else replies.json_reply(built)

        return _refusing(route)

    def one_model(request: Request) -> dict[str, object]:
        if request.path_params["model"] != card.name:
            raise Refusal(
                404,
                f"the model is {card.name}",
                code=UNKNOWN_MODEL,
                facts={"model": request.path_params["model"]},
            )
        return model

    def model_info(_request: Request) -> dict[str, object]:
        return {
            "model_path": card.path,
            "tokenizer_path": card.path,
            "served_model_name": card.name,
            "is_generation": True,
            "weight_version": str(source.version),
            "max_model_len": card.context,
        }

    def workers(request: Request) -> dict[str, object]:
        # A client that names itself in its URL goes on to do so: it may abort its requests at the workers.
        named = credentials_of(request.headers)
        url = f"{request.url.scheme}://{named and named + '@'}{request.url.netloc}"
        worker = {"url": url, "model_id": card.name, "is_healthy": True, "load": answers()}
        return {"workers": [worker], "total": 1}

    def figures(_request: Request) -> Response:
        return metrics_reply(metrics, source, answers)

    async def healthy(_request: Request) -> Response:
        return replies.json_reply({"status": "ok"})

    for path, route in {
        "/health": healthy,
        "/healthz": healthy,
        "/v1/models": known(lambda _: {"object": "list", "data": [model], "has_more": False}),
        "/v1/models/{model:path}": known(one_model),
        "/model_info": known(model_info),
        "/get_model_info": known(model_info),
        "/workers": known(workers),
        "/metrics": known(figures),
    }.items():
        _add(app, "GET", path, route)


def metrics_reply(metrics: ServingMetrics, source: TokenSource, answers: Callable[[], int]) -> Response:
    """Return all figures of now."""
    metrics.answers.set(answers())
    metrics.version.set(source.version)
    return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Refuse what has no route, in the words of the protocol. OPTIONS is no error where there is a route."""
    headers = dict(error.headers or {})
    if "Allow" in headers:
        methods = {name.strip() for name in headers["Allow"].split(",")} | {"OPTIONS"}
        headers["Allow"] = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
    message = f"{request.method} {request.url.path}: {str(error.detail).lower()}"
    reply = replies.error_reply(Refusal(error.status_code, message), _protocol(request))
    reply.headers.update(headers)
    return reply


async def _failed(request: Request, _error: Exception) -> Response:
    """Reply to the client that the gateway has failed. The server logs the error."""
    return replies.error_reply(Refusal(500, "the gateway has failed"), _protocol(request))


def _protocol(request: Request) -> Protocols:
    return protocol_of(request.url.path, request.headers)


def create_admin_app(source: TokenSource, metrics: ServingMetrics, answers: Callable[[], int]) -> FastAPI:
    """Return the application for the operator. It has no keys: it listens on loopback only."""
    app = _application("Slipstream gateway, administration")

    async def figures(_request: Request) -> Response:
        return metrics_reply(metrics, source, answers)

    async def state(_request: Request) -> Response:
        return replies.json_reply(
            {"answers": answers(), "version": source.version, "retry_after_s": source.retry_after_s()}
        )

    for path, route in {"/metrics": figures, "/state": state, "/healthz": state}.items():
        _add(app, "GET", path, route)
    return app
