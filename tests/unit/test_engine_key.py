"""The key of a server: a request without it reaches nothing, whatever it asks for; the key shows nowhere."""

import asyncio
import pickle

import pytest

from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.system.key import NO_KEY, Key, KeyRequired, new_key

KEY = new_key()


class Application:
    """Records every scope that reaches it."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    async def __call__(self, scope, receive, send) -> None:
        self.reached.append(scope["type"])


async def never():
    raise AssertionError("the body of the request was read")


def ask(kind: str, headers: list[tuple[bytes, bytes]], **scope) -> tuple[list[str], list[dict]]:
    """What reaches the application behind the key, and what is sent without it."""
    application, sent = Application(), []

    async def send(message) -> None:
        sent.append(message)

    asyncio.run(
        KeyRequired(application, KEY)({"type": kind, "headers": headers, **scope}, never, send)  # type: ignore
    )
    return application.reached, sent


WRONG = {
    "no key": [],
    "another key": [(b"authorization", new_key().header.encode())],
    "the key alone": [(b"authorization", KEY.encode())],
    "another scheme": [(b"authorization", b"Basic " + KEY.encode())],
    "a part of the key": [(b"authorization", KEY.header[:-1].encode())],
    "more than the key": [(b"authorization", KEY.header.encode() + b" ")],
    "no text": [(b"authorization", b"Bearer \xff\xfe")],
    "the key and another": [(b"authorization", KEY.header.encode()), (b"authorization", b"Bearer x")],
    "another header": [(b"x-authorization", KEY.header.encode())],
}


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/generate"), ("GET", "/health"), ("GET", "/health_generate"), ("OPTIONS", "/generate")],
)
def test_a_request_without_the_key_is_refused_unread_whatever_it_asks_for(headers, method, path):
    reached, [start, body] = ask("http", headers, method=method, path=path)
    assert reached == []
    assert start["status"] == 401
    assert KEY.encode() not in body["body"]


def test_a_request_with_the_key_passes():
    assert ask("http", [(b"accept", b"*/*"), (b"authorization", KEY.header.encode())]) == (["http"], [])


def test_a_web_socket_needs_the_key_too():
    assert ask("websocket", []) == ([], [{"type": "websocket.close", "code": 1008}])
    assert ask("websocket", [(b"authorization", KEY.header.encode())]) == (["websocket"], [])


def test_the_start_of_the_server_is_no_request():
    application = Application()
    asyncio.run(KeyRequired(application, KEY)({"type": "lifespan"}, never, never))  # type: ignore[arg-type]
    assert application.reached == ["lifespan"]


def test_an_empty_key_protects_nothing_and_is_refused():
    with pytest.raises(ValueError, match="protects nothing"):
        KeyRequired(Application(), NO_KEY)


def test_keys_differ():
    assert len({new_key() for _ in range(100)}) == 100
    assert len(new_key()) >= 43, "256 bits"


def test_what_holds_a_key_does_not_show_it():
    address = EngineAddress("engine-0", "http://x", 1, 1, 1, 1, key=KEY)
    for shown in (
        repr(address),
        f"{address}",
        f"{address!r}",
        str([KEY]),
        f"{ {'api_key': KEY} }",
        repr(KEY),
    ):
        assert KEY not in shown


def test_a_key_travels_between_processes():
    received = pickle.loads(pickle.dumps(EngineAddress("engine-0", "http://x", 1, 1, 1, 1, key=KEY)))
    assert received.key == KEY
    assert isinstance(received.key, Key)
