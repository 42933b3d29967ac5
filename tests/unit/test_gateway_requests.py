"""What a client may set, how often it may ask, and what it says about itself."""

import asyncio

import pytest
from starlette.datastructures import Headers
from starlette.requests import Request

from slipstream.rollout.gateway.conversations import User
from slipstream.rollout.gateway.serving.fields import CHAT, check_fields
from slipstream.rollout.gateway.serving.handling import arrival_of, read_body
from slipstream.rollout.gateway.serving.limits import Rates, Refusal
from slipstream.rollout.gateway.serving.messages import StreamedMessages, as_template_reads
from slipstream.rollout.tokens.turn_entries import TurnType

KNOWN = dict.fromkeys([*CHAT, "rid", "lora_path", "input_ids"]) | {"background": False}


def arrival(*, headers=None, path=None, response=None, user=None, raw=b"{}", **body):
    return arrival_of(
        user or User("anna"),
        endpoint="v1/chat/completions",
        path_session=path,
        response_session=response,
        headers=Headers(headers or {}),
        body=body,
        raw=raw,
        now_s=0.0,
    )


def test_a_field_that_sglang_knows_and_the_list_does_not_is_refused():
    with pytest.raises(Refusal, match="may not set input_ids, rid") as caught:
        check_fields({"messages": [], "rid": "x", "input_ids": [1]}, CHAT, KNOWN)
    assert (caught.value.status, caught.value.param) == (400, "input_ids")


def test_fields_that_nobody_knows_and_those_of_the_gateway_do_not_reach_sglang():
    body = {"messages": [], "new_in_2031": 1, "session_id": "s", "lora_path": None, "background": False}
    assert check_fields(body, CHAT, KNOWN) == ({"messages": []}, ["new_in_2031", "background"])


@pytest.mark.parametrize(
    "body",
    [
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": [1]},
        {"metadata": {"a": 1}},
        {"metadata": "a"},
    ],
)
def test_templates_and_labels_that_are_no_texts_are_refused(body):
    with pytest.raises(Refusal) as caught:
        check_fields(body, CHAT, KNOWN)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"path": "p", "headers": {"x-session-id": "h"}}, "p"),
        ({"headers": {"session_id": "h2", "x-session-id": "h1"}, "session_id": "b"}, "h1"),
        ({"headers": {"x-session-affinity": "h3"}, "session_id": "b"}, "b"),
        ({"headers": {"x-session-affinity": "h3"}}, None),
        ({"session_id": "b", "response": "r"}, "b"),
        ({"response": "r", "user": User("anna", session="k")}, "r"),
        ({"user": User("anna", session="k")}, "k"),
        ({}, None),
    ],
)
def test_the_first_name_of_a_session_counts(given, expected):
    assert arrival(**given).session == expected


@pytest.mark.parametrize(
    ("field", "value"), [("session_id", "x" * 257), ("turn_type", "both"), ("session_done", "2")]
)
def test_what_cannot_be_read_is_a_bad_request(field, value):
    with pytest.raises(Refusal, match=field) as caught:
        arrival(**{field: value})
    assert caught.value.status == 400


def test_what_a_request_says_beside_its_session_is_read():
    read = arrival(headers={"x-session-done": "on", "x-turn-type": "side"})
    assert (read.ends_session, read.turn_type) == (True, TurnType.SIDE)


def test_a_retry_has_the_digest_of_the_request_and_another_session_has_not():
    first = arrival(raw=b'{"a": 1}')
    retry = arrival(raw=b'{"a": 1}', headers={"x-stainless-retry-count": "2"})
    assert (first.digest, first.retries, retry.retries) == (retry.digest, 0, 2)
    assert arrival(raw=b'{"a": 1}', path="s").digest != first.digest
    assert arrival(raw=b'{"a": 2}').digest != first.digest


def test_a_key_that_has_used_more_tokens_than_its_rate_waits_until_they_are_paid():
    now = [0.0]
    rates = Rates(per_minute=60, clock=lambda: now[0], unit="tokens")
    rates.check("anna")
    rates.charge("anna", 90)
    rates.check("berta")
    with pytest.raises(Refusal, match="60 tokens a minute") as caught:
        rates.check("anna")
    assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "30")
    now[0] = 31.0
    rates.check("anna")


def test_a_key_may_send_its_rate_at_once_and_then_evenly():
    now = [0.0]
    rates = Rates(per_minute=6, clock=lambda: now[0])
    for _ in range(6):
        rates.take("anna")
    with pytest.raises(Refusal) as caught:
        rates.take("anna")
    assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "10")
    rates.take("berta")
    now[0] = 10.0
    rates.take("anna")
    with pytest.raises(Refusal):
        rates.take("anna")


def test_streamed_calls_are_put_together_by_their_index():
    collected = StreamedMessages(1)

    def delta(**fields):
        collected.add({"choices": [{"index": 0, "delta": fields}]})

    def call(index, arguments, name=None):
        return {"index": index, "id": name, "function": {"name": name, "arguments": arguments}}

    delta(reasoning_content="hm")
    delta(content="\n\nso \n")
    delta(tool_calls=[call(0, "", "f")])
    delta(tool_calls=[call(0, '{"a":')])
    delta(tool_calls=[call(1, "{}", "g")])
    delta(tool_calls=[call(0, " 1}")])
    [message] = collected.messages()
    assert (message["content"], message["reasoning_content"]) == ("so", "hm"), (
        "the blanks before a call are the template's"
    )
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == [
        ("f", {"a": 1}),
        ("g", {}),
    ]


def test_arguments_that_are_no_json_stay_as_they_are():
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": '}}
    message = as_template_reads({"content": None, "tool_calls": [call]})
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_a_body_that_does_not_come_is_a_time_out():
    async def never() -> dict:
        await asyncio.Event().wait()
        return {}

    scope = {"type": "http", "method": "POST", "headers": [], "path": "/"}
    with pytest.raises(Refusal, match="not come within") as caught:
        asyncio.run(read_body(Request(scope, never), 10, within_s=0.01))
    assert caught.value.status == 408
