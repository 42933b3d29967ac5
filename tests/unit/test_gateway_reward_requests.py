"""Requests for rewards as they arrive: each is refused by name, or answered truthfully."""

import asyncio
import json
from typing import Any

import pytest

from slipstream.rollout.gateway.serving.rewarding import MOST_PROBLEMS
from tests.unit.plain_gateway import ANNA, BERTA, PlainGateway
from tests.unit.test_gateway_running import on_a_loop

GIVEN = {"value": 1, "session": "s"}
HALF = r"\ud800"
"""Half of a surrogate pair, which JSON can write and UTF-8 cannot."""


def body(**changes: Any) -> bytes:
    return json.dumps(GIVEN | changes).encode()


REFUSED: list[tuple[bytes, str, str | None]] = [
    (b"\xef\xbb\xbf" + body(), "not JSON", None),
    (json.dumps(GIVEN).encode("utf-16"), "not JSON", None),
    (b'{"value": 1, "session": "\xe9"}', "not JSON", None),
    (b"value=1&session=s", "not JSON", None),
    (b"\x1f\x8b\x08\x00", "not JSON", None),
    (b"   ", "not JSON", None),
    (b"null", "expected a JSON object", None),
    (b'"s"', "expected a JSON object", None),
    (b"true", "expected a JSON object", None),
    (b"[" + body() + b"]", "expected a JSON object", None),
    (body() + body(), "not JSON", None),
    (body() + b"// done", "not JSON", None),
    (b"{'value': 1, 'session': 's'}", "not JSON", None),
    (b'{"value": 1, "session": "s",}', "not JSON", None),
    (b'{"value": .5, "session": "s"}', "not JSON", None),
    (b'{"value": +1, "session": "s"}', "not JSON", None),
    (b'{"value": 01, "session": "s"}', "not JSON", None),
    (b'{"value": 1' + b"0" * 5000 + b', "session": "s"}', "digits", None),
    (b'{"value": 1, "session": "s", "session": "t"}', '"session" is given twice', "session"),
    (b'{"value": 1, "session": "s", "x": {"a": 1, "a": 2}}', '"a" is given twice', "a"),
    (body(Value=2), "did you mean `value`?", "Value"),
    (body(value={"value": 1}), "value: expected a finite number", "value"),
    (body(value="Infinity"), 'found "Infinity"', "value"),
    (body(value="1.0"), 'found "1.0"', "value"),
    (body(value=[]), "found []", "value"),
    (body(value="x" * 60_000), "found", "value"),
    (body(turn=1 << 70), "turn: expected the place", "turn"),
    (body(turn=[0]), "found [0]", "turn"),
    (body(choice=0), "`choice` is of no use without `response_id`", "choice"),
    (body(response_id="chatcmpl-1"), "expected exactly one of", "session"),
    (body(session=None), "found null", "session"),
    (body(session="s\x00"), "session: expected the name", "session"),
    (body(session="s" * 257), "session: expected the name", "session"),
    (body(key="k" * 257), "key: expected a text", "key"),
    (body(key="a\nb"), "key: expected a text", "key"),
    (body(name="ü"), "name: expected 1 to 64", "name"),
    (body(name=["tests"]), "name: expected 1 to 64", "name"),
    (body(discount="0.5"), "discount: expected a number", "discount"),
    (body(discount=True), "discount: expected a number", "discount"),
    (b'{"value": 1, "response_id": "chatcmpl-"}', "response_id: expected the id of an answer", "response_id"),
    (b'{"value": 1, "response_id": "%b"}' % HALF.encode(), "response_id: expected", "response_id"),
    (b'{"value": 1, "session": "s", "%b": 1}' % HALF.encode(), "there is no field", HALF),
    (
        b'{"value": 1, "session": "s", "%b": 1, "%b": 2}' % (HALF.encode(), HALF.encode()),
        "is given twice",
        HALF,
    ),
    (b'{"value": "%b", "session": "s"}' % HALF.encode(), f'found "{HALF}"', "value"),
    (b'{"value": %b, "session": "s"}' % (b"[" * 900 + b"]" * 900), "value: expected", "value"),
    (b'{"value": 1, "session": "s", "%b": 1}' % (b"x" * 60_000), "there is no field", "x" * 80),
    (b"{%b}" % b",".join(b'"f%d": 1' % n for n in range(5000)), f"and {5002 - MOST_PROBLEMS} more", "value"),
]


@on_a_loop
async def test_a_wrong_reward_is_refused_by_name_and_in_few_words():
    gateway = PlainGateway()
    await gateway.ask("#say Hello", {"x-session-id": "s"})
    wrong = []
    for number, (raw, told, param) in enumerate(REFUSED):
        reply = await gateway.http.post("/rewards", content=raw)
        error = reply.json().get("error", {})
        if (reply.status_code, error.get("param"), len(reply.content) < 4000) != (400, param, True):
            wrong.append((number, reply.status_code, raw[:80], error.get("param"), reply.content[:300]))
        elif told not in error["message"]:
            wrong.append((number, told, error["message"][:300]))
    assert not wrong, "\n".join(map(str, wrong))
    [session] = (await gateway.http.get("/sessions")).json()["sessions"]
    assert session["turns"][0]["rewards"] == {}, "none of them has counted"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/json", ""])
@on_a_loop
async def test_a_body_counts_whatever_its_type_is_said_to_be(kind):
    """curl sends JSON as a form unless it is told otherwise."""
    gateway = PlainGateway()
    await gateway.ask("#say Hello", {"x-session-id": "s"})
    reply = await gateway.http.post("/rewards", content=body(), headers={"content-type": kind})
    assert (reply.status_code, reply.json()["status"]) == (200, "counted")


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("path", ["/rewards", "/sessions/s/reward"])
@on_a_loop
async def test_a_reward_by_another_method_is_refused_with_the_one_that_there_is(path, method):
    reply = await PlainGateway().http.request(method, path, content=body())
    assert (reply.status_code, reply.headers["allow"]) == (405, "OPTIONS, POST")


@on_a_loop
async def test_a_reward_for_what_is_not_there_or_is_anothers_is_told_the_same():
    gateway = PlainGateway()
    own = await gateway.ask("#say Hello", {"x-session-id": "s"})
    places: list[dict[str, Any]] = [
        {"session": "s"},
        {"session": "s", "turn": 0},
        {"response_id": own.json()["id"]},
        {"response_id": own.headers["x-request-id"]},
    ]
    none: list[dict[str, Any]] = [
        {"session": "t"},
        {"session": "t", "turn": 0},
        {"response_id": "chatcmpl-" + "0" * 32},
        {"response_id": "0" * 32},
    ]
    for place, unknown in zip(places, none, strict=True):
        replies = [
            await gateway.http.post("/rewards", json={"value": 1, **where}, headers=who)
            for where, who in ((place, BERTA), (unknown, BERTA), (unknown, ANNA))
        ]
        assert [reply.status_code for reply in replies] == [404] * 3
        told = [reply.json()["error"]["message"] for reply in replies]
        for value in (*place.values(), *unknown.values()):
            told = [text.replace(str(value).removeprefix("chatcmpl-"), "X") for text in told]
        assert len(set(told)) == 1, told
        given = await gateway.http.post("/rewards", json={"value": 1, **place})
        assert given.json()["status"] == "counted"
    for where in (
        {"turn": 1, "session": "s"},
        {"response_id": own.json()["id"], "choice": 1},
        {"call_id": "c"},
    ):
        assert (await gateway.http.post("/rewards", json={"value": 1, **where})).status_code == 404


@pytest.mark.parametrize("header", [False, True])
@on_a_loop
async def test_of_equal_givings_at_the_same_time_one_counts_and_another_value_is_a_conflict(header):
    gateway = PlainGateway()
    await gateway.ask("#say Hello", {"x-session-id": "s"})

    def give(value: float):
        named = {} if header else {"key": "k"}
        return gateway.http.post(
            "/rewards",
            json=GIVEN | {"value": value} | named,
            headers={"idempotency-key": "k"} if header else {},
        )

    gateway.entries.hold()
    giving = [asyncio.ensure_future(give(value)) for value in (1, 1.0, 0.5, 1)]
    done, _ = await asyncio.wait(giving, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result().status_code for task in done] == [409], "the others are not durable yet"
    gateway.entries.release()
    replies = await asyncio.gather(*giving)
    assert [reply.status_code for reply in replies] == [200, 200, 409, 200]
    assert [reply.json().get("again") for reply in replies] == [False, True, None, True]
    assert "was used for another reward" in replies[2].json()["error"]["message"]
    assert [turn["value"] for turn in (await give(1)).json()["turns"]] == [1.0]


@on_a_loop
async def test_a_client_that_gives_a_reward_again_hears_what_the_driver_had_not_said_in_time():
    gateway, told = PlainGateway(), ["", "", "expired"]

    async def outcomes(numbers):
        return [told.pop(0) for _ in numbers]

    gateway.entries.outcomes = outcomes
    await gateway.ask("#say Hello", {"x-session-id": "s"})
    statuses = []
    for _ in range(4):
        reply = await gateway.http.post("/rewards", content=body(key="k"))
        statuses.append((reply.status_code, reply.json()["turns"][0]["outcome"]))
    assert statuses == [(202, None), (202, None), (409, "expired"), (409, "expired")]
    assert not told


@pytest.mark.parametrize("key", ["", " ", "k" * 257])
@on_a_loop
async def test_a_header_that_names_no_giving_is_refused(key):
    gateway = PlainGateway()
    await gateway.ask("#say Hello", {"x-session-id": "s"})
    reply = await gateway.http.post("/rewards", content=body(), headers={"idempotency-key": key})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "key")


@on_a_loop
async def test_a_reward_beyond_the_longest_body_or_without_a_key_is_refused():
    gateway = PlainGateway()
    long = await gateway.http.post("/rewards", content=body(name="n" * 70_000))
    keyless = await gateway.http.post("/rewards", content=body(), headers={"authorization": ""})
    assert (long.status_code, keyless.status_code) == (413, 401)


@pytest.mark.parametrize("path", ["%ff", "%00", "%C3%BC", "s" * 257])
@on_a_loop
async def test_a_path_that_names_no_session_is_refused(path):
    reply = await PlainGateway().http.post(f"/sessions/{path}/reward", json={"reward": 1})
    assert reply.status_code == 400 and "the path names" in reply.json()["error"]["message"]
