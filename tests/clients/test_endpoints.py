"""The endpoints over plain HTTP: what is refused, sessions, ends of connections, native ones."""

import json
import re
import shutil
import threading
import time
from contextlib import closing
from http.client import HTTPConnection

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.backend.quickstart import tokenizer as quickstart
from tests.chat_model import build_tokenizer
from tests.clients.openapi_bodies import bodies
from tests.gateway_process import GatewayProcess
from tests.scripted_source import logprob

ANNA = {"authorization": "Bearer key-anna"}
MESSAGES = [{"role": "user", "content": "#say Hello"}]
CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ANTHROPIC, COUNT, GENERATE = "/v1/messages", "/v1/messages/count_tokens", "/generate"
VOCABULARY = len(build_tokenizer())
"""An odd number of ids: ranks would pad it."""
BODIES = {
    CHAT: {"messages": MESSAGES},
    COMPLETION: {"prompt": "#say Hello", "max_tokens": 30},
    RESPONSES: {"input": "#say Hello"},
    ANTHROPIC: {"model": "m", "messages": MESSAGES, "max_tokens": 30},
    COUNT: {"model": "m", "messages": MESSAGES},
    GENERATE: {"text": "#say Hello"},
}


@pytest.fixture
def http(gateway):
    with httpx.Client(base_url=gateway.url, headers=ANNA, timeout=60) as client:
        yield client


def eventually(condition) -> None:
    """Wait until something holds that another process does by itself."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it never happened")


@pytest.mark.parametrize("path", BODIES)
def test_every_endpoint_answers_its_smallest_request(http, path):
    reply = http.post(path, json=BODIES[path])
    assert reply.status_code == 200, reply.text
    assert "Hello" in reply.text or path == COUNT


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "field",
    [
        {"rid": "x"},
        {"extra_key": "x"},
        {"priority": 5},
        {"lora_path": "x"},
        {"custom_logit_processor": "x"},
        {"bootstrap_host": "x"},
        {"bootstrap_port": 1},
        {"bootstrap_room": 1},
        {"session_params": {"id": "x"}},
        {"chat_template": "{{ messages }}"},
        {"cache_salt": "x"},
    ],
    ids=lambda field: next(iter(field)),
)
def test_what_is_not_for_clients_is_refused_or_has_no_effect(http, gateway, path, field):
    """Where SGLang itself does not read a field, as /v1/messages does not read most, it cannot have any."""
    before = len(gateway.control()["arrivals"])
    reply = http.post(path, json={**BODIES[path], **field})
    known = "chat_template" in field or path in (CHAT, COMPLETION, GENERATE, RESPONSES)
    read_by_responses = {
        "extra_key",
        "priority",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "cache_salt",
    }
    if path == RESPONSES and "chat_template" not in field:
        known = bool(read_by_responses & field.keys())
    assert reply.status_code == (400 if known else 200), reply.text
    if known:
        assert next(iter(field)) in reply.text
        assert len(gateway.control()["arrivals"]) == before


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, {"input_ids": [1, 2]}),
        (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}),
        (RESPONSES, {"background": True}),
        (RESPONSES, {"request_id": "resp_1"}),
        (GENERATE, {"sampling_params": {"custom_params": {"a": 1}}}),
        (GENERATE, {"image_data": "http://127.0.0.1:1/x.png"}),
        (GENERATE, {"logprob_start_len": 3, "return_logprob": True}),
        (COMPLETION, {"echo": True, "logprobs": 0}),
        (COMPLETION, {"n": 5}),
        (COMPLETION, {"prompt": [[1], [2], [3]], "n": 2}),
        (COMPLETION, {"prompt": [VOCABULARY]}),
        (COMPLETION, {"prompt": [[1], [VOCABULARY]]}),
        (COMPLETION, {"prompt": [-1]}),
        (GENERATE, {"text": None, "input_ids": [1, VOCABULARY]}),
        (GENERATE, {"text": None, "input_ids": [[1], [VOCABULARY]]}),
    ],
)  # fmt: skip
def test_ids_templates_and_crowds_are_refused(http, path, field):
    reply = http.post(path, json={**BODIES[path], **field})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"1", b'{"messages": 5, "prompt": {}, "input": 5}'])
def test_a_body_that_cannot_be_read_is_a_bad_request(http, path, content):
    assert http.post(path, content=content).status_code == 400


@pytest.mark.parametrize("path", BODIES)
def test_nobody_is_answered_without_a_key(gateway, path):
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "key-anna"}):
        reply = httpx.post(gateway.url + path, json=BODIES[path], headers=headers)
        assert reply.status_code == 401
        kind = "authentication_error" if path in (ANTHROPIC, COUNT) else "invalid_request_error"
        assert reply.json()["error"]["type"] == kind


@pytest.mark.parametrize("path", ["/v1/models", "/model_info", "/workers", "/metrics"])
def test_facts_are_for_users_and_health_is_for_everybody(gateway, http, path):
    assert httpx.get(gateway.url + path).status_code == 401
    assert http.get(path).status_code == 200
    assert (
        httpx.get(gateway.url + "/health").status_code
        == httpx.get(gateway.url + "/healthz").status_code
        == 200
    )


def test_a_body_that_is_too_long_is_refused_before_it_is_read(gateway):
    long = b'{"messages": "' + b"x" * 70_000 + b'"}'
    reply = httpx.post(gateway.url + CHAT, content=long, headers=ANNA)
    assert reply.status_code == 413
    chunked = httpx.post(gateway.url + CHAT, content=iter([long[:40_000], long[40_000:]]), headers=ANNA)
    assert chunked.status_code == 413


def test_other_programs_learn_about_model_and_workers(http, gateway):
    assert http.get("/model_info").json()["weight_version"] == "4"
    [worker] = http.get("/workers").json()["workers"]
    assert worker["url"] == gateway.url
    text = http.get("/metrics").text
    assert 'slipstream_gateway_requests_total{endpoint="v1/chat/completions",status="200"}' in text


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/v1/chat/completions/", "/v2/x", "/docs", "//"])
def test_an_unknown_path_is_not_found_in_openais_words(http, method, path):
    reply = http.request(method, path, json={})
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "invalid_request_error")


def test_an_unknown_path_is_not_found_in_anthropics_words(http):
    reply = http.post("/v1/messages/batches", json={})
    assert reply.status_code == 404
    assert reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [(CHAT, "OPTIONS, POST"), ("/v1/models", "GET, HEAD, OPTIONS"), (ANTHROPIC, "OPTIONS, POST")],
)
def test_methods_that_a_path_does_not_have_are_named_with_those_that_it_has(http, path, allowed):
    reply = http.request("DELETE", path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
    assert reply.json()["error"]["type"] == "invalid_request_error"
    reply = httpx.options(str(http.base_url) + path)
    assert (reply.status_code, reply.headers["allow"], reply.content) == (204, allowed, b"")


@pytest.mark.parametrize(
    "path", ["/health", "/healthz", "/v1/models", "/v1/models/scripted", "/metrics", "/nowhere"]
)
def test_head_is_get_without_a_body(http, path):
    got, headed = http.get(path), http.head(path)
    assert (headed.status_code, headed.content) == (got.status_code, b"")
    assert headed.headers["content-type"] == got.headers["content-type"]


class TestGenerate:
    def test_the_last_id_of_the_vocabulary_is_one(self, http):
        body = {"input_ids": [VOCABULARY - 1], "sampling_params": {"max_new_tokens": 2}}
        assert http.post(GENERATE, json=body).status_code == 200

    def test_ids_give_ids_and_log_probs(self, http, gateway):
        ids = list(b"#say ab")  # not the ids of the tokenizer: any ids are read
        reply = http.post(GENERATE, json={"input_ids": ids, "sampling_params": {"max_new_tokens": 2},
                                          "return_logprob": True, "top_logprobs_num": 1}).json()  # fmt: skip
        assert len(reply["output_ids"]) == 2
        meta = reply["meta_info"]
        assert meta["prompt_tokens"] == len(ids)
        assert [row[1] for row in meta["output_token_logprobs"]] == reply["output_ids"]
        assert [row[0] for row in meta["output_token_logprobs"]] == pytest.approx([logprob(0), logprob(1)])
        assert meta["weight_versions"] == [
            {"version": "3", "start": 0, "end": 1},
            {"version": "4", "start": 1, "end": 2},
        ]
        assert gateway.control()["answers"][-1]["tokens"] == reply["output_ids"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_prompt_is_scored_also_without_a_new_token(self, http, stream):
        body = {
            "input_ids": list(range(64, 70)),
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": stream,
        }
        text = http.post(GENERATE, json=body).text
        reply = json.loads(text.removeprefix("data: ").partition("\n")[0])
        rows = reply["meta_info"]["input_token_logprobs"]
        assert [row[1] for row in rows] == body["input_ids"]
        assert rows[0][0] is None
        assert [row[0] for row in rows[1:]] == pytest.approx([logprob(place) for place in range(1, 6)])
        assert reply["output_ids"] == []

    def test_sampling_parameters_reach_the_engine(self, http, gateway):
        parameters = {"temperature": 0.3, "top_k": 7, "stop": ["l"], "regex": "a+", "min_p": 0.1}
        reply = http.post(GENERATE, json={"text": "#say Hello", "sampling_params": parameters}).json()
        assert reply["text"] == "He"
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "l"}
        assert parameters.items() <= gateway.control()["requests"][-1].items()

    def test_values_that_would_end_an_engine_are_refused_before_they_reach_it(self, http, gateway):
        before = len(gateway.control()["requests"])
        harmful = {"logit_bias": {"3": -1e39}, "stop_regex": "(a+)+$", "min_p": 2.0}
        native = http.post(GENERATE, json={"text": "#say Hello", "sampling_params": harmful})
        chat = http.post(CHAT, json={**BODIES[CHAT], "logit_bias": {"3": -1e39}, "top_k": 2**31})
        assert (native.status_code, chat.status_code) == (400, 400)
        assert all(name in native.text for name in harmful), native.text
        assert "logit_bias" in chat.text and "top_k" in chat.text, chat.text
        assert len(gateway.control()["requests"]) == before

    def test_a_batch_gives_a_list(self, http):
        reply = http.post(GENERATE, json={"text": ["#say a", "#say b"]}).json()
        assert [part["text"] for part in reply] == ["a", "b"]
        reply = http.post(GENERATE, json={"text": "#say a", "sampling_params": {"n": 2}}).json()
        assert [part["text"] for part in reply] == ["a", "a"]

    def test_a_stream_repeats_what_came_before(self, http):
        with http.stream("POST", GENERATE, json={"text": "#chunk=2 #say Hello", "stream": True}) as reply:
            events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        assert events[-1] == "[DONE]"
        parts = [json.loads(event) for event in events[:-1]]
        assert [part["text"] for part in parts] == ["He", "Hell", "Hello"]
        assert len(parts[-1]["output_ids"]) == 6


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 60_000}]}),
        (CHAT, {"messages": [{"role": "user", "content": "#say a " + " b" * 9_000}]}),
        (COMPLETION, {"prompt": ["#say a", "x" * 60_000]}),
        (RESPONSES, {"input": "x" * 60_000}),
        (ANTHROPIC, {**BODIES[ANTHROPIC], "system": "x" * 60_000}),
        (COUNT, {**BODIES[COUNT], "system": "x" * 60_000}),
        (GENERATE, {"text": "x" * 60_000}),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_at_every_endpoint(http, path, body):
    reply = http.post(path, json=body)
    assert reply.status_code == 400
    assert "2048" in reply.text or "> 2047 maximum" in reply.text
    assert reply.json()["error"].get("code", "context_length_exceeded") == "context_length_exceeded"


def test_a_long_text_is_refused_unread_where_one_unknown_token_may_stand_for_all_of_it(chat_model, tmp_path):
    shutil.copy(chat_model / "config.json", tmp_path)
    quickstart.build_tokenizer().save_pretrained(tmp_path)
    with GatewayProcess(tmp_path) as unspelled:
        reply = unspelled.http.post(
            CHAT, json={"messages": [{"role": "user", "content": "é" * 300_000}]}, headers=ANNA
        )
    assert reply.status_code == 400
    assert "context length is 2048 tokens. However, your messages resulted in 4687 tokens" in reply.text


TOO_LONG = {
    CHAT: {"messages": [{"role": "user", "content": "x" * 60_000}]},
    COMPLETION: {"prompt": "x" * 60_000},
    RESPONSES: {"input": "x" * 60_000},
    ANTHROPIC: {**BODIES[ANTHROPIC], "system": "x" * 60_000},
    COUNT: {**BODIES[COUNT], "system": "x" * 60_000},
    GENERATE: {"text": "x" * 60_000},
}


@pytest.mark.parametrize(
    "changes",
    [{}, {"stream": True}, {"temperature": -1}, {"regex": "a" * 10_000}, "too long"],
    ids=str,
)
@pytest.mark.parametrize("path", BODIES)
def test_no_request_stays_in_memory_when_it_has_its_reply(http, gateway, path, changes):
    """A gateway looks for garbage seldom: bodies of megabytes would be kept until then."""
    http.post(path, json=BODIES[path])  # what stays is made with the first one
    gateway.control(garbage=True)
    for _ in range(3):
        http.post(path, json=TOO_LONG[path] if changes == "too long" else BODIES[path] | changes).read()
    assert gateway.control(garbage=True)["garbage"] == []


class TestSessions:
    @pytest.mark.parametrize(
        ("path", "headers", "body", "name"),
        [
            ("/sessions/p" + CHAT, {"x-session-id": "h"}, {"session_id": "b"}, "p"),
            (CHAT, {"x-session-id": "h"}, {"session_id": "b"}, "h"),
            (CHAT, {"session_id": "h2"}, {"session_id": "b"}, "b"),
            (CHAT, {"session_id": "h2"}, {}, "h2"),
            (CHAT, {"x-session-affinity": "h3"}, {}, "h3"),
            (CHAT, {}, {"session_id": "two words ~100%"}, "two words ~100%"),
            (CHAT, {}, {"session_id": 7}, "7"),
            (CHAT, {"authorization": "Bearer key-side"}, {}, "the-one"),
        ],
    )
    def test_a_session_is_named_in_the_answer_its_header_and_every_chunk(
        self, http, path, headers, body, name
    ):
        reply = http.post(path, json={**BODIES[CHAT], **body}, headers=headers)
        assert reply.json()["session_id"] == name
        assert reply.headers["x-session-id"] == name
        with http.stream(
            "POST", path, json={**BODIES[CHAT], **body, "stream": True}, headers=headers
        ) as reply:
            events = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
        assert {json.loads(event)["session_id"] for event in events} == {name}

    @pytest.mark.parametrize(
        ("path", "headers", "name"),
        [
            (CHAT, {}, "größer"),
            ("/sessions/gr%C3%B6%C3%9Fer" + CHAT, {}, None),
            (CHAT, {"x-session-id": "größer".encode()}, None),
            (CHAT, {"x-session-id": "größer".encode("latin-1")}, None),
        ],
    )
    def test_a_name_that_a_header_could_not_return_is_refused_wherever_it_stands(
        self, http, path, headers, name
    ):
        reply = http.post(path, json={**BODIES[CHAT], "session_id": name}, headers=headers)
        assert reply.status_code == 400
        assert "expected printable ASCII characters" in reply.json()["error"]["message"]

    @pytest.mark.parametrize("path", [ANTHROPIC, RESPONSES, COMPLETION, GENERATE])
    def test_every_protocol_names_the_session_in_its_events(self, http, path):
        body = {**BODIES[path], "stream": True, "session_id": "s"}
        with http.stream("POST", path, json=body) as reply:
            events = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
        assert events and {json.loads(event)["session_id"] for event in events} == {"s"}

    def test_models_are_below_a_session_as_well(self, http):
        assert http.get("/sessions/s/v1/models").json() == http.get("/v1/models").json()
        assert http.get("/sessions/s/v1/models/scripted").json()["id"] == "scripted"
        reply = http.get("/v1/models/gpt%2F4")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")

    def test_two_requests_without_a_name_share_no_session(self, http):
        first, second = (http.post(CHAT, json=BODIES[CHAT]).json()["session_id"] for _ in range(2))
        assert first != second

    def test_type_and_end_are_passed_on(self, http, gateway):
        http.post(CHAT, json={**BODIES[CHAT], "turn_type": "side", "session_done": "yes"})
        arrival = gateway.control()["arrivals"][-1]
        assert (arrival["turn_type"], arrival["ends_session"]) == (1, True)
        assert http.post(CHAT, json={**BODIES[CHAT], "turn_type": "x"}).status_code == 400

    def test_a_client_rewards_a_turn(self, http, gateway):
        http.post("/sessions/rewarded" + CHAT, json=BODIES[CHAT])
        assert http.post("/sessions/rewarded/reward", json={"reward": 0.5, "turn": 0}).status_code == 200
        assert gateway.control()["rewards"][-1] == ["anna", "rewarded", 0.5, [0]]
        assert http.post("/sessions/rewarded/reward", json={"reward": 0.5, "turn": 1}).status_code == 404
        assert http.post("/sessions/%20rewarded/reward", json={"reward": 0.25}).status_code == 200
        assert gateway.control()["rewards"][-1] == ["anna", "rewarded", 0.25, [0]]
        assert http.post("/sessions/nowhere/reward", json={"reward": 1}).status_code == 404
        assert http.post("/sessions/%C3%BC/reward", json={"reward": 1}).status_code == 400
        for reward in (None, "1", True, 1e39):
            assert http.post("/sessions/rewarded/reward", json={"reward": reward}).status_code == 400

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("path", [CHAT, COMPLETION, RESPONSES, ANTHROPIC])
    def test_an_answer_is_rewarded_by_the_id_that_its_client_has_got(self, http, gateway, path, stream):
        reply = http.post(path, json={**BODIES[path], "stream": stream})
        id_ = re.findall(r'"id": ?"((?:chatcmpl-|cmpl-|resp_|msg_)[0-9a-f]+)"', reply.text)[0]
        rewarded = http.post("/rewards", json={"response_id": id_, "value": 0.5}).json()
        assert rewarded["status"] == "counted"
        assert rewarded["turns"][0]["response_id"] == reply.headers["x-request-id"]
        assert rewarded["session_id"] == reply.headers["x-session-id"]
        berta = {"authorization": "Bearer key-berta"}
        other = http.post("/rewards", json={"response_id": id_, "value": 0.5}, headers=berta)
        unknown = http.post("/rewards", json={"response_id": "chatcmpl-0", "value": 0.5}, headers=berta)
        assert other.status_code == unknown.status_code == 404

    def test_a_wrong_reward_is_refused_and_a_key_counts_once(self, http):
        http.post("/sessions/once" + CHAT, json=BODIES[CHAT])
        wrong = http.post("/sessions/once/reward", json={"reward": 1, "response_id": "chatcmpl-x"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "response_id"
        body, headers = {"session": "once", "value": 1}, {"idempotency-key": "k"}
        first, again = (http.post("/rewards", json=body, headers=headers).json() for _ in range(2))
        assert first == again | {"again": False} and again["again"] is True
        other = http.post("/rewards", json={**body, "value": 0}, headers=headers)
        assert other.status_code == 409 and "was used for another reward" in other.text


class TestAborts:
    def ask(self, http, gateway, path: str, meanwhile) -> list[str]:
        """Return the events of an answer that stands still behind its first tokens until ``meanwhile``."""
        gateway.control(hold=True)
        text = json.dumps({**BODIES[path], "stream": True}).replace("#say Hello", "#hold #say Hello, I go on")
        with http.stream("POST", path, content=text) as reply:
            meanwhile(reply.headers["x-request-id"])
            return [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]

    def abort(self, http, rid: str, **headers: str) -> int:
        reply = http.post("/abort_request", json={"rid": rid}, headers=headers)
        assert reply.status_code == 200
        return reply.json()["aborted"]

    @pytest.mark.parametrize("path", [CHAT, ANTHROPIC, RESPONSES, COMPLETION, GENERATE])
    def test_an_answer_ends_where_it_is_and_is_not_trained(self, http, gateway, path):
        cancelled = gateway.control()["cancelled"]
        events = self.ask(http, gateway, path, lambda rid: self.abort(http, rid))
        assert not any(json.loads(event).get("error") for event in events if event != "[DONE]")
        after = gateway.control()
        assert (after["cancelled"], after["running"]) == (cancelled + 1, 0)
        assert (after["answers"][-1]["cancelled"], after["answers"][-1]["text"]) == (True, "Hell")

    def test_the_native_answer_says_so_and_keeps_its_tokens(self, http, gateway):
        [*_, last, end] = self.ask(http, gateway, GENERATE, lambda rid: self.abort(http, rid))
        assert (json.loads(last)["meta_info"]["finish_reason"]["type"], end) == ("abort", "[DONE]")
        assert (json.loads(last)["text"], len(json.loads(last)["output_ids"])) == ("Hell", 4)

    def test_a_chat_is_named_by_the_id_of_its_answer_too_and_says_that_it_was_aborted(self, http, gateway):
        [*_, last, _] = self.ask(http, gateway, CHAT, lambda rid: self.abort(http, f"chatcmpl-{rid}"))
        assert json.loads(last)["choices"][0]["finish_reason"] == "abort"

    def test_nobody_aborts_what_another_key_has_asked(self, http, gateway):
        def fail_to_abort(rid: str) -> None:
            assert self.abort(http, rid, authorization="Bearer key-berta") == 0
            assert httpx.post(gateway.url + "/abort_request", json={"rid": rid}).status_code == 401
            gateway.control(release=True)

        [*_, last, _] = self.ask(http, gateway, GENERATE, fail_to_abort)
        assert json.loads(last)["text"] == "Hello, I go on"

    @pytest.mark.parametrize("body", [{}, {"rid": 7}, {"rid": ""}, {"rid": "x", "abort_all": True}])
    def test_a_request_is_named(self, http, body):
        assert http.post("/abort_request", json=body).status_code == 400

    def test_what_does_not_run_is_not_aborted(self, http):
        rid = http.post(CHAT, json=BODIES[CHAT]).headers["x-request-id"]
        assert http.post("/abort_request", json={"rid": rid}).json() == {"aborted": 0}


class TestEnds:
    def test_a_client_that_goes_while_it_streams_stops_the_generation(self, http, gateway):
        cancelled = gateway.control(hold=True)["cancelled"]
        body = {"messages": [{"role": "user", "content": "#hold #say Hello, I am long"}], "stream": True}
        with http.stream("POST", CHAT, json=body) as reply:
            next(reply.iter_lines())
        eventually(lambda: gateway.control()["cancelled"] == cancelled + 1)
        answer = gateway.control()["answers"][-1]
        assert (answer["cancelled"], answer["text"]) == (True, "Hell")

    @pytest.mark.parametrize("path", [CHAT, ANTHROPIC, RESPONSES, COMPLETION, GENERATE])
    def test_a_client_that_goes_while_it_waits_stops_the_generation(self, http, gateway, path):
        cancelled = gateway.control(hold=True)["cancelled"]
        text = json.dumps(BODIES[path]).replace("#say", "#hold #say")
        with closing(HTTPConnection(gateway.url.removeprefix("http://"), timeout=60)) as connection:
            connection.request("POST", path, text, ANNA)
            eventually(lambda: gateway.control()["running"] == 1)
        eventually(lambda: gateway.control()["cancelled"] == cancelled + 1)
        assert gateway.control()["answers"][-1]["cancelled"]
        assert gateway.control()["running"] == 0

    @pytest.mark.parametrize("path", [CHAT, ANTHROPIC, RESPONSES, COMPLETION, GENERATE])
    @pytest.mark.parametrize("stream", [False, True])
    def test_the_last_byte_waits_until_the_turn_is_durable(self, http, gateway, path, stream):
        recorded = len(gateway.control(hold_log=True)["answers"])
        lines, ended = [], threading.Event()

        def read() -> None:
            with http.stream("POST", path, json={**BODIES[path], "stream": stream}) as reply:
                lines.extend(line for line in reply.iter_lines() if line)
            ended.set()

        reader = threading.Thread(target=read)
        reader.start()
        try:
            eventually(lambda: len(gateway.control()["answers"]) == recorded + 1)
            assert not ended.wait(0.3)
        finally:
            gateway.control(release_log=True)
            reader.join(60)
        assert ended.is_set() and lines

    def test_a_retry_joins_the_turn_that_runs(self, http, gateway):
        before = gateway.control(hold=True)
        body = {"messages": [{"role": "user", "content": "#hold #say Hello, I am long"}]}
        replies = []

        def ask(**headers: str) -> None:
            replies.append(httpx.post(gateway.url + CHAT, json=body, headers={**ANNA, **headers}, timeout=60))

        first = threading.Thread(target=ask)
        first.start()
        eventually(lambda: gateway.control()["running"] == 1)
        second = threading.Thread(target=ask, kwargs={"x-stainless-retry-count": "1"})
        second.start()
        eventually(lambda: len(gateway.control()["arrivals"]) == len(before["arrivals"]) + 2)
        gateway.control(release=True)
        for thread in (first, second):
            thread.join(60)
        after = gateway.control(hold=True)
        assert [r.json()["choices"][0]["message"]["content"] for r in replies] == ["Hello, I am long"] * 2
        assert len(after["requests"]) == len(before["requests"]) + 1
        assert len(after["answers"]) == len(before["answers"]) + 1
        for name in ("id", "session_id"):
            assert replies[0].json()[name] == replies[1].json()[name], "rewards name the answer by it"
        assert replies[0].headers["x-request-id"] == replies[1].headers["x-request-id"]

    @pytest.mark.parametrize("path", [CHAT, ANTHROPIC, RESPONSES, COMPLETION, GENERATE])
    def test_a_stream_that_breaks_off_ends_with_an_error(self, http, gateway, path):
        text = json.dumps({**BODIES[path], "stream": True}).replace("#say", "#fail #say")
        with http.stream("POST", path, content=text) as reply:
            assert reply.status_code == 200
            lines = list(reply.iter_lines())
        assert any("error" in line or "failed" in line or '"abort"' in line for line in lines)
        eventually(lambda: gateway.control()["answers"][-1]["cancelled"])

    @pytest.mark.parametrize(
        ("path", "name", "spares_others"), [(COMPLETION, "prompt", False), (GENERATE, "text", True)]
    )
    def test_an_answer_beside_one_that_breaks_off_is_trained_if_its_client_has_got_it(
        self, http, gateway, path, name, spares_others
    ):
        """OpenAI's streams end with an error for all answers, SGLang's with an end of each."""
        body = {name: ["#say ok", "#chunk=1 #fail #say Hello"], "stream": True}
        with http.stream("POST", path, json=body) as reply:
            assert "cannot be finished" in reply.read().decode()
        eventually(lambda: gateway.control()["running"] == 0)
        cancelled = {answer["text"]: answer["cancelled"] for answer in gateway.control()["answers"][-2:]}
        assert cancelled == {"ok": not spares_others, "H": True}

    def test_a_stream_that_breaks_off_beside_an_answer_that_goes_on_is_closed_once(self, http, gateway):
        """SGLang's generators leave what they read to the event loop, which closes it in another task."""
        before = gateway.control(hold=True)
        body = {"prompt": ["#hold #say Hello, I am long", "#chunk=1 #fail #say Hello"], "stream": True}
        for _ in range(5):
            with http.stream("POST", COMPLETION, json=body) as reply:
                assert "cannot be finished" in reply.read().decode()
        eventually(lambda: len(gateway.control()["answers"]) == len(before["answers"]) + 10)
        after = gateway.control()
        assert after["running"] == 0
        assert after["cancelled"] == before["cancelled"] + 5
        assert after["exceptions"] == before["exceptions"]

    def test_an_answer_that_breaks_off_before_its_first_byte_may_be_asked_for_again(self, http):
        text = json.dumps(BODIES[CHAT]).replace("#say", "#fail #say")
        reply = http.post(CHAT, content=text)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


def test_what_is_recorded_is_the_engines(http, gateway):
    http.post(CHAT, json=BODIES[CHAT])
    answer = gateway.control()["answers"][-1]
    assert answer["logprobs"] == pytest.approx([logprob(i) for i in range(6)])
    assert answer["spans"] == [[3, 3], [4, 3]]
    assert not answer["cancelled"]


FUZZED = [CHAT, COMPLETION, RESPONSES, ANTHROPIC, COUNT, GENERATE, "/sessions/{session}/reward", "/rewards"]


@pytest.fixture(scope="module")
def document(gateway):
    return gateway.control(openapi=True)["openapi"]


@pytest.mark.parametrize("path", FUZZED)
def test_no_body_makes_the_gateway_fail(gateway, document, path):
    gateway.control(release=True)

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(
        bodies(document, path, BODIES.get(path, {"reward": 1, "value": 1})),
        st.sampled_from([{}, {"x-session-id": "s"}, {"x-turn-type": "side"}]),
    )
    def fuzz(body, headers) -> None:
        reply = gateway.http.post(path.replace("{session}", "s"), json=body, headers={**ANNA, **headers})
        broken_off = reply.status_code == 503 and "cannot be finished" in reply.text  # as the script says
        assert reply.status_code < 500 or broken_off, (body, reply.text)
        assert reply.status_code != 422

    fuzz()
    gateway.control(hold=True)
