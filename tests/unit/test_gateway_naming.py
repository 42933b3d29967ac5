"""Names in requests: keys, sessions, types of turns, ids of answers."""

from base64 import b64encode

import pytest
from starlette.datastructures import Headers

from slipstream.rollout.gateway import naming
from slipstream.rollout.tokens.turn_entries import TurnType


def name(path=None, headers=None, body=None):
    return naming.session_name(path, headers or {}, body or {})


def test_the_first_name_in_the_order_of_places_counts():
    headers = {"x-session-id": "a", "session_id": "b"}
    body = {"session_id": "d"}
    assert name("p", headers, body) == "p"
    assert name(None, headers, body) == "a"
    del headers["x-session-id"]
    assert name(None, headers, body) == "d"
    assert name(None, headers) is None, "this header is an agent's own"
    assert name() is None


@pytest.mark.parametrize("header", naming.CLIENT_HEADERS)
def test_an_agent_names_its_session_by_a_header_of_its_own(header):
    assert naming.client_session({header: " c "}) == "c"
    later = naming.CLIENT_HEADERS[naming.CLIENT_HEADERS.index(header) + 1 :]
    assert naming.client_session(dict.fromkeys(later, "d") | {header: "c"}) == "c"
    with pytest.raises(ValueError, match=f"the header {header} names"):
        naming.client_session({header: "x" * 257})


def test_a_blank_name_is_none_and_a_number_is_a_name():
    assert name(None, {"x-session-id": "  "}, {"session_id": 7}) == "7"


@pytest.mark.parametrize("wrong", ["x" * 257, "a\nb", "ü", True, ["a"], {"a": 1}, 1.5])
def test_a_name_that_cannot_be_one_is_refused(wrong):
    with pytest.raises(ValueError, match="session_id names"):
        name(None, {}, {"session_id": wrong})
    if isinstance(wrong, str):
        with pytest.raises(ValueError, match="the path names"):
            name(wrong, {"x-session-id": "a"})


@pytest.mark.parametrize("word", ["1", "true", "YES", " on ", 1, True])
def test_a_session_is_done_by_header_or_body(word):
    assert naming.session_done({}, {"session_done": word})
    assert naming.session_done({"x-session-done": str(word)}, {"session_done": False})


@pytest.mark.parametrize("word", ["0", "false", "", "no", "off", 0, False])
def test_a_session_goes_on_otherwise(word):
    assert not naming.session_done({}, {})
    assert not naming.session_done({}, {"session_done": word})
    assert not naming.session_done({"x-session-done": str(word)}, {"session_done": True})


@pytest.mark.parametrize("word", ["2", "maybe", 2, 1.0, ["1"], {}])
def test_an_end_that_is_neither_yes_nor_no_is_refused(word):
    with pytest.raises(ValueError, match=r"session_done is .* expected 1, true"):
        naming.session_done({}, {"session_done": word})


def test_the_type_of_a_turn_is_the_headers_then_the_bodys():
    assert naming.turn_type({"x-turn-type": "Side"}, {"turn_type": "main"}) is TurnType.SIDE
    assert naming.turn_type({}, {"turn_type": " main "}) is TurnType.MAIN
    assert naming.turn_type({"x-turn-type": ""}, {}) is None
    for wrong in ("both", 1, ["main"]):
        with pytest.raises(ValueError, match="expected main or side"):
            naming.turn_type({}, {"turn_type": wrong})


@pytest.mark.parametrize(("text", "count"), [("2", 2), ("", 0), ("x", 0), ("-1", 0), ("9" * 50, 0), ("²", 0)])
def test_a_retry_count_that_is_no_number_is_none(text, count):
    assert naming.retries({"x-stainless-retry-count": text}) == count


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer k"}, "k"),
        ({"x-api-key": "k"}, "k"),
        ({"authorization": f"Basic {b64encode(b'user:k').decode()}"}, "k"),
        ({"authorization": f"Basic {b64encode(b'k').decode()}"}, ""),
        ({"authorization": "Basic ?"}, ""),
        ({"authorization": "Basic /w=="}, ""),
        ({}, ""),
    ],
)
def test_a_key_comes_as_clients_of_providers_or_urls_with_a_password_send_it(headers, key):
    assert naming.key_of(Headers(headers)) == key


@pytest.mark.parametrize("answer", ["chatcmpl-5f", "cmpl-5f", "resp_5f", "5f"])
def test_the_request_of_an_answer_is_in_its_id(answer):
    assert naming.request_of(answer) == "5f"
