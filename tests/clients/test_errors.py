"""Errors as the providers say them: the official clients raise their own classes, with the right words."""

import json

import anthropic
import httpx
import openai
import pytest

from slipstream.rollout.gateway.serving.limits import Refusal
from slipstream.rollout.gateway.serving.words import WORDS, Protocols, error_body, words_of
from tests.gateway_process import GatewayProcess

LONG = "x" * 3000


@pytest.fixture
def gpt(gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="key-anna", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(gateway):
    with anthropic.Anthropic(base_url=gateway.url, api_key="key-anna", max_retries=0) as client:
        yield client


def user(text: str) -> list:
    return [{"role": "user", "content": text}]


def chat(client, text: str = "a", **more):
    return client.chat.completions.create(model="m", messages=user(text), **more)


def message(client, text: str = "a", **more):
    return client.messages.create(**{"model": "m", "max_tokens": 9, "messages": user(text), **more})


OPENAI = {
    "invalid": (lambda c: chat(c, top_p=7), openai.BadRequestError, 400, "invalid_request_error", None),
    "field": (
        lambda c: chat(c, extra_body={"lora_path": "x"}),
        openai.BadRequestError,
        400,
        "invalid_request_error",
        None,
    ),
    "too long": (
        lambda c: chat(c, LONG),
        openai.BadRequestError,
        400,
        "invalid_request_error",
        "context_length_exceeded",
    ),
    "too long, streamed": (
        lambda c: chat(c, LONG, stream=True),
        openai.BadRequestError,
        400,
        "invalid_request_error",
        "context_length_exceeded",
    ),
    "too long for responses": (
        lambda c: c.responses.create(model="m", input=LONG),
        openai.BadRequestError,
        400,
        "invalid_request_error",
        "context_length_exceeded",
    ),
    "key": (
        lambda c: chat(c.with_options(api_key="wrong")),
        openai.AuthenticationError,
        401,
        "invalid_request_error",
        "invalid_api_key",
    ),
    "model": (
        lambda c: c.models.retrieve("gpt-9"),
        openai.NotFoundError,
        404,
        "invalid_request_error",
        "model_not_found",
    ),
    "response": (
        lambda c: c.responses.retrieve("resp_1"),
        openai.NotFoundError,
        404,
        "invalid_request_error",
        None,
    ),
    "previous response": (
        lambda c: c.responses.create(model="m", input="a", previous_response_id="resp_1"),
        openai.BadRequestError,
        400,
        "invalid_request_error",
        "previous_response_not_found",
    ),
    "path": (
        lambda c: c.post("/nowhere", cast_to=object, body={}),
        openai.NotFoundError,
        404,
        "invalid_request_error",
        None,
    ),
    "too large": (
        lambda c: chat(c, "x" * 70_000),
        openai.APIStatusError,
        413,
        "invalid_request_error",
        "request_too_large",
    ),
    "failed": (
        lambda c: chat(c, "#fail #say Hello"),
        openai.InternalServerError,
        503,
        "service_unavailable_error",
        "server_is_overloaded",
    ),
}
ANTHROPIC = {
    "invalid": (
        lambda c: message(c, extra_body={"top_p": 7}),
        anthropic.BadRequestError,
        400,
        "invalid_request_error",
    ),
    "too long": (lambda c: message(c, LONG), anthropic.BadRequestError, 400, "invalid_request_error"),
    "too long, streamed": (
        lambda c: message(c, LONG, stream=True),
        anthropic.BadRequestError,
        400,
        "invalid_request_error",
    ),
    "too long to count": (
        lambda c: c.messages.count_tokens(model="m", messages=user("x" * 60_000)),
        anthropic.BadRequestError,
        400,
        "invalid_request_error",
    ),
    "key": (
        lambda c: message(c.with_options(api_key="wrong")),
        anthropic.AuthenticationError,
        401,
        "authentication_error",
    ),
    "model": (lambda c: c.models.retrieve("claude-9"), anthropic.NotFoundError, 404, "not_found_error"),
    "path": (lambda c: c.messages.batches.list(), anthropic.NotFoundError, 404, "not_found_error"),
    "method": (
        lambda c: c.get("/v1/messages", cast_to=object),
        anthropic.APIStatusError,
        405,
        "invalid_request_error",
    ),
    "too large": (
        lambda c: message(c, "x" * 70_000),
        anthropic.APIStatusError,
        413,
        "request_too_large",
    ),
    "failed": (
        lambda c: message(c, "#fail #say Hello"),
        anthropic.InternalServerError,
        529,
        "overloaded_error",
    ),
}


@pytest.mark.parametrize("situation", OPENAI)
def test_openais_client_raises_its_own_class(gpt, situation):
    ask, kind, status, type_, code = OPENAI[situation]
    with pytest.raises(kind) as caught:
        ask(gpt)
    error = caught.value
    assert (error.status_code, error.type, error.code) == (status, type_, code)


@pytest.mark.parametrize("situation", ANTHROPIC)
def test_anthropics_client_raises_its_own_class(claude, situation):
    ask, kind, status, type_ = ANTHROPIC[situation]
    with pytest.raises(kind) as caught:
        ask(claude)
    body = caught.value.body
    assert (caught.value.status_code, body["type"], body["error"]["type"]) == (status, "error", type_)


def test_no_room_is_overload_in_both_providers_words_and_says_when_to_come_again(gateway, gpt, claude):
    gateway.control(full_for_s=3)
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            chat(gpt, stream=True)
        assert (caught.value.status_code, caught.value.code) == (503, "server_is_overloaded")
        assert caught.value.response.headers["retry-after"] == "3"
        with pytest.raises(anthropic.InternalServerError, match="Overloaded") as caught:
            message(claude)
        assert caught.value.status_code == 529
        assert caught.value.response.headers["retry-after"] == "3"
    finally:
        gateway.control(full_for_s=None)


def test_agents_read_both_lengths_in_the_phrase_that_makes_them_compact(gpt, claude):
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: (\d+) tokens > 2047 maximum"):
        message(claude, LONG)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
        chat(gpt, LONG)
    with pytest.raises(openai.BadRequestError, match="Your input exceeds the context window of this model"):
        gpt.responses.create(model="m", input=LONG)


def test_a_stream_of_responses_fails_with_the_events_that_codex_and_openais_client_know(gateway, gpt):
    reply = httpx.post(
        f"{gateway.url}/v1/responses",
        json={"model": "m", "input": LONG, "stream": True},
        headers={"authorization": "Bearer key-anna"},
    )
    assert (reply.status_code, reply.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n") if "data: " in line]
    kinds = [event["type"] for event in events]
    assert kinds == ["response.created", "response.in_progress", "error", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
    with pytest.raises(openai.APIError) as caught:
        list(gpt.responses.create(model="m", input=LONG, stream=True))
    assert caught.value.code == "context_length_exceeded"


def test_every_row_of_the_table_can_be_said_by_every_protocol():
    facts = {"tokens": 9, "context": 8, "longest": 7, "model": "m"}
    for row in (*WORDS, 405, 409, 418, 502):
        code, status = (row, 400) if isinstance(row, str) else (None, row)
        refused = Refusal(status, "so it is", code=code, retry_after_s=1.5, facts=facts)
        for protocol in Protocols:
            words = words_of(refused, protocol)
            assert 400 <= words.status < 600 and words.type and words.phrase
            error = error_body(refused, protocol)["error"]
            assert set(error) >= {"type", "message"} and "{" not in error["message"]
    assert "try again in 2s" in words_of(Refusal(429, "x", retry_after_s=1.5), Protocols.OPENAI).phrase


@pytest.fixture(scope="module")
def limited(chat_model):
    """A gateway with small quotas of each key."""
    with GatewayProcess(chat_model, limits={"requests_per_minute": 3, "tokens_per_minute": 60}) as process:
        yield process


def test_quotas_of_a_key_are_rate_limits_with_the_time_until_it_may_go_on(limited):
    with openai.OpenAI(base_url=f"{limited.url}/v1", api_key="key-anna", max_retries=0) as client:
        chat(client, "#say " + "a" * 120)  # a key may use more than it has left, and pays for it
        with pytest.raises(openai.RateLimitError, match="60 tokens a minute") as caught:
            chat(client)
    error = caught.value
    assert (error.type, error.code) == ("tokens", "rate_limit_exceeded")
    assert int(error.response.headers["retry-after"]) > 60
    with anthropic.Anthropic(base_url=limited.url, api_key="key-berta", max_retries=0) as client:
        for _ in range(3):
            with pytest.raises(anthropic.BadRequestError):
                message(client, max_tokens=0)
        with pytest.raises(anthropic.RateLimitError, match="3 requests a minute") as caught:
            message(client, max_tokens=0)
    assert caught.value.body["error"]["type"] == "rate_limit_error"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 20
