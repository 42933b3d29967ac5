"""A client whose sessions train the policy: it opens them at a gateway, and rewards them.

    client = Client("http://127.0.0.1:30000", key)
    with client.session(task="sums") as session:
        policy = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
        ...                                # any framework that takes an address and a key
        session.reward(0.7)

No judge is asked about such a session: each of its turns waits for its reward. The module needs httpx and
nothing else of Slipstream, so that it runs wherever the agent does. Safe to use from several threads.
"""

import asyncio
import inspect
import os
import time
import uuid
from collections.abc import Callable, Coroutine
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast
from urllib.parse import quote

import httpx

P = ParamSpec("P")
R = TypeVar("R", bound=float | Coroutine[Any, Any, float | None] | None)

ATTEMPTS = 6
"""Attempts at a request that the gateway may take later, or whose connection breaks."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""Times between two attempts, unless the gateway names one."""

LATER = frozenset({429, 503})


class GatewayRefused(RuntimeError):
    """The gateway has refused a request. The message says what was wrong, and ``status`` is its HTTP status:
    404 for what does not exist or is another key's, 409 for a reward that comes too late.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class RewardedSession:
    """A session that its client rewards. As a context manager it only names the block of its requests."""

    def __init__(self, client: "Client", name: str, prompt: object = None) -> None:
        self._client = client
        self.name = name
        self.prompt = prompt
        """What ``Client.group`` was given."""

    @property
    def base_url(self) -> str:
        """Address for OpenAI's clients. Anthropic's take it without ``/v1``."""
        return f"{self._client.url}/sessions/{quote(self.name, safe='')}/v1"

    @property
    def api_key(self) -> str:
        return self._client.api_key

    def reward(
        self,
        value: float,
        *,
        turn: int | None = None,
        response_id: str | None = None,
        call_id: str | None = None,
        name: str | None = None,
        discount: float | None = None,
        key: str | None = None,
    ) -> dict[str, Any]:
        """Reward the session, or one turn of it, and return what the gateway says of it.

        ``turn``, ``response_id``, ``call_id``: one turn. ``name``: one of several rewards, which add up.
        ``discount``: factor of a turn's share for each main turn after it. ``key``: name of this call, which
        counts once however often it is made; a new one unless it is given.

        Raises GatewayRefused.
        """
        named = {"response_id": response_id, "call_id": call_id}
        place = {field: id_ for field, id_ in named.items() if id_ is not None} or {"session": self.name}
        options = {"turn": turn, "name": name, "discount": discount}
        body = {"value": value, "key": key or uuid.uuid4().hex, **place}
        body |= {field: option for field, option in options.items() if option is not None}
        return self._client.post("/rewards", body, session=self.name)

    def turns(self) -> list[dict[str, Any]]:
        """Return the turns that have ended: ids, policy versions, and rewards. Raises GatewayRefused."""
        return self._client.request("GET", f"/sessions/{quote(self.name, safe='')}")["turns"]

    def forget(self) -> None:
        """Have the gateway and the run forget the session. Raises GatewayRefused."""
        self._client.forget(self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the session open: a reward may come later, and without one its turns are never trained."""


class Client:
    """Opens, lists and forgets sessions at a gateway."""

    def __init__(
        self, url: str | None = None, api_key: str | None = None, *, timeout_s: float = 60.0
    ) -> None:
        """``url``: of the gateway, with or without ``/v1``; None: ``OPENAI_BASE_URL``. ``api_key``: of
        ``slipstream key add``; None: ``OPENAI_API_KEY``. Raises ValueError without one of them.
        """
        url = url or os.environ.get("OPENAI_BASE_URL", "")
        api_key = api_key or os.environ.get("OPENAI_API_KEY", "")
        missing = [
            f"{what} (or set {variable})"
            for what, variable, value in (
                ("`url`", "OPENAI_BASE_URL", url),
                ("`api_key`", "OPENAI_API_KEY", api_key),
            )
            if not value
        ]
        if missing:
            raise ValueError(f"give {' and '.join(missing)}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key
        headers = {"authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s)

    def session(self, **tags: str | float | bool) -> RewardedSession:
        """Open a session. ``tags``: what lists call it. Raises GatewayRefused."""
        [name] = self.post("/sessions", {"tags": tags, "key": uuid.uuid4().hex})["sessions"]
        return RewardedSession(self, name)

    def group(self, prompt: object, n: int, **tags: str | float | bool) -> list[RewardedSession]:
        """Open n sessions of one task, whose rewards are compared with each other as GRPO does.

        They are trained once each has a reward. ``prompt``: what they have in common. It is not sent. Raises
        GatewayRefused.
        """
        body = {"count": n, "group": True, "tags": tags, "key": uuid.uuid4().hex}
        names = self.post("/sessions", body)["sessions"]
        return [RewardedSession(self, name, prompt) for name in names]

    def episode(self, function: Callable[Concatenate[RewardedSession, P], R]) -> Callable[P, R]:
        """Make a function an episode: it gets a session of its own first, and returns the session's reward.

        None, and an exception, are no reward: the session is not trained. The function may be ``async``.
        """
        if inspect.iscoroutinefunction(function):

            async def asynchronous(*args: P.args, **kwargs: P.kwargs) -> float | None:
                session = await asyncio.to_thread(self.session, episode=function.__name__)
                value = await cast("Coroutine[Any, Any, float | None]", function(session, *args, **kwargs))
                if value is not None:
                    await asyncio.to_thread(session.reward, value)
                return value

            return cast("Callable[P, R]", wraps(function)(asynchronous))

        @wraps(function)
        def plain(*args: P.args, **kwargs: P.kwargs) -> R:
            session = self.session(episode=function.__name__)
            value = function(session, *args, **kwargs)
            if value is not None:
                session.reward(cast(float, value))
            return value

        return plain

    def sessions(self) -> list[dict[str, Any]]:
        """Return all sessions of the key that the gateway knows, with their turns. Raises GatewayRefused."""
        return self.request("GET", "/sessions")["sessions"]

    def forget(self, session: str) -> None:
        """Have the gateway and the run forget a session. Raises GatewayRefused."""
        self.request("DELETE", f"/sessions/{quote(session, safe='')}")

    def post(self, path: str, body: dict[str, Any], *, session: str | None = None) -> dict[str, Any]:
        """Send a request with a body. ``session``: where it belongs. Raises GatewayRefused."""
        return self.request("POST", path, body, {} if session is None else {"x-session-id": session})

    def request(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Send a request until the gateway takes it. Raises GatewayRefused, and httpx's errors."""
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                reply = self._http.request(method, path, json=body, headers=headers)
            except httpx.TransportError:
                if attempt == ATTEMPTS:
                    raise
            else:
                if reply.status_code not in LATER or attempt == ATTEMPTS:
                    return _content(reply)
                pause_s = max(pause_s, float(reply.headers.get("retry-after", 0)))
            time.sleep(min(pause_s, LONGEST_PAUSE_S))
            pause_s *= 2
        raise AssertionError("the last attempt has returned or raised")

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _content(reply: httpx.Response) -> dict[str, Any]:
    """Return the JSON of a reply. Raises GatewayRefused for an error."""
    if reply.is_success:
        return reply.json()
    try:
        message = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = reply.text[:500] or reply.reason_phrase
    raise GatewayRefused(reply.status_code, str(message))
