"""Traces of requests by every protocol, as a collector of OpenTelemetry's gets them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.test_endpoints import ANNA, ANTHROPIC, BODIES, CHAT, COMPLETION, GENERATE, RESPONSES
from tests.gateway_process import GatewayProcess
from tests.otlp_collector import Collector

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def traced(chat_model: Path) -> Iterator[tuple[GatewayProcess, Collector]]:
    with Collector() as collector:
        traces = {"endpoint": collector.url, "content": True}
        with GatewayProcess(chat_model, tool_parser="qwen25", traces=traces) as process:
            yield process, collector


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "operation"),
    [
        (CHAT, "chat"),
        (COMPLETION, "text_completion"),
        (RESPONSES, "chat"),
        (ANTHROPIC, "chat"),
        (GENERATE, "text_completion"),
    ],
)
def test_every_protocol_is_traced_and_its_rewards_find_the_span(traced, path, operation, stream):
    process, collector = traced
    headers = {**ANNA, "traceparent": f"00-{TRACE}-{PARENT}-01"}
    reply = httpx.post(
        process.url + path, json={**BODIES[path], "stream": stream}, headers=headers, timeout=60
    )
    assert reply.status_code == 200
    span = collector.next()
    values = span["attributes"]
    model = BODIES[path].get("model", "scripted")
    assert (span["traceId"], span["parentSpanId"], span["name"]) == (TRACE, PARENT, f"{operation} {model}")
    assert f'"{values["gen_ai.response.id"]}"' in reply.text, "the client has got this id"
    assert values["gen_ai.conversation.id"] == reply.headers["x-session-id"]
    assert values["gen_ai.response.finish_reasons"] == ["stop"] and "status" not in span
    assert values["gen_ai.usage.output_tokens"] > 0 and values["gen_ai.usage.input_tokens"] > 0
    assert values.get("gen_ai.request.stream", False) is stream
    [answer] = json.loads(values["gen_ai.output.messages"])
    assert answer["parts"] == [{"type": "text", "content": "Hello"}]
    reward = {"value": 0.5, "response_id": values["gen_ai.response.id"]}
    assert httpx.post(f"{process.url}/rewards", json=reward, headers=ANNA).status_code == 200
    event = collector.next()
    assert (event["traceId"], event["spanId"]) == (TRACE, span["spanId"])
    assert event["attributes"]["gen_ai.response.id"] == values["gen_ai.response.id"]


def test_calls_and_their_results_are_parts_of_messages(traced):
    process, collector = traced
    with httpx.Client(base_url=process.url, headers=ANNA, timeout=60) as http:
        asked: list[dict[str, Any]] = [{"role": "user", "content": f"#say {CALL}"}]
        message = http.post(CHAT, json={"messages": asked, "tools": TOOLS}).json()["choices"][0]["message"]
        [call] = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "1"}
        body = {
            "messages": [*asked, message, result, {"role": "user", "content": "#say Done"}],
            "tools": TOOLS,
        }
        assert http.post(CHAT, json=body).status_code == 200
    first, second = collector.next(), collector.next()
    assert first["attributes"]["gen_ai.response.finish_reasons"] == ["tool_call"]
    part = {"type": "tool_call", "id": call["id"], "name": "add", "arguments": {"a": 1}}
    [said] = json.loads(first["attributes"]["gen_ai.output.messages"])
    assert said == {"role": "assistant", "parts": [part], "finish_reason": "tool_call"}
    given = json.loads(second["attributes"]["gen_ai.input.messages"])
    assert [each["role"] for each in given] == ["user", "assistant", "tool", "user"]
    assert given[1]["parts"] == [part]
    assert given[2]["parts"] == [{"type": "tool_call_response", "id": call["id"], "response": "1"}]


def test_a_client_that_goes_and_a_refusal_are_errors_and_counted_tokens_are_no_span(traced):
    process, collector = traced
    with httpx.Client(base_url=process.url, headers=ANNA, timeout=60) as http:
        http.post("/v1/messages/count_tokens", json=BODIES["/v1/messages/count_tokens"]).raise_for_status()
        process.control(hold=True)
        body = {"messages": [{"role": "user", "content": "#hold #say Hello, I am long"}], "stream": True}
        with http.stream("POST", CHAT, json=body) as reply:
            next(reply.iter_lines())
        gone = collector.next()
        process.control(release=True)
        assert (gone["status"], gone["attributes"]["error.type"]) == ({"code": 2}, "client_gone")
        assert gone["attributes"]["gen_ai.response.finish_reasons"] == ["cancelled"]
        assert http.post(ANTHROPIC, json={**BODIES[ANTHROPIC], "temperature": -1}).status_code == 400
        assert collector.next()["attributes"]["error.type"] == "invalid_request_error"
