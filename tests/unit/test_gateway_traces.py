"""Spans of requests and events of rewards, as a collector of OpenTelemetry's gets them."""

import asyncio
import json
from typing import Any

import pytest

from slipstream.backend.driver.start.plugin_checks import plugin_problems
from slipstream.configs.load import load_recipe
from slipstream.configs.schema import GatewayConfig, TracesConfig
from slipstream.rollout.gateway.conversations import RewardedTurn, TakenReward
from slipstream.rollout.gateway.otlp import OtlpExport, headers_of
from slipstream.rollout.gateway.serving.traces import Traces
from slipstream.rollout.tokens.turn_entries import UserReward
from tests.otlp_collector import Collector
from tests.unit.plain_gateway import CHAT, PlainGateway
from tests.unit.talking import encode
from tests.unit.test_config_rules import base
from tests.unit.test_gateway_running import on_a_loop

__all__ = ["base"]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "swordfish"


def service(collector: Collector, **settings: Any) -> PlainGateway:
    return PlainGateway(TracesConfig(endpoint=collector.url, **settings))


async def following(collector: Collector) -> dict[str, Any]:
    return await asyncio.to_thread(collector.next)


@on_a_loop
async def test_a_request_is_a_span_in_the_words_of_the_conventions_below_that_of_its_client():
    with Collector() as collector:
        gateway = service(collector)
        before = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "x-session-id": "s"}
        reply = await gateway.ask("#say Hello", before, model="mine", temperature=0.5, n=2)
        span = await following(collector)
        assert (span["traceId"], span["parentSpanId"], span["traceState"]) == (TRACE, PARENT, "vendor=1")
        assert (span["name"], span["kind"]) == ("chat mine", 3) and "status" not in span
        answers = gateway.source.requests
        assert span["attributes"] == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "slipstream",
            "gen_ai.request.model": "mine",
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.max_tokens": 100,
            "gen_ai.request.choice.count": 2,
            "gen_ai.response.id": reply.json()["id"],
            "gen_ai.response.model": "policy",
            "gen_ai.response.finish_reasons": ["stop", "stop"],
            "gen_ai.usage.input_tokens": len(answers[0].input_ids),
            "gen_ai.usage.cache_read.input_tokens": 0,
            "gen_ai.usage.output_tokens": 2 * (len(encode("Hello")) + 1),
            "gen_ai.conversation.id": "s",
            "slipstream.policy_versions": [3, 4],
        }
        await gateway.traces.export.close()


@on_a_loop
async def test_a_stream_is_a_span_until_its_last_byte_and_its_first_chunk_is_timed():
    with Collector() as collector:
        gateway = service(collector)
        assert (
            "Hello"
            in json.loads("".join((await gateway.ask("#say Hello", stream=True)).text.split()[1:2]))[:5]
        )
        attributes = (await following(collector))["attributes"]
        assert attributes["gen_ai.request.stream"] is True
        assert attributes["gen_ai.response.time_to_first_chunk"] >= 0
        assert attributes["gen_ai.response.finish_reasons"] == ["stop"]
        await gateway.ask("#fail #say Hello and more", stream=True)
        failed = await following(collector)
        assert failed["status"] == {"code": 2}
        assert failed["attributes"]["error.type"] == "server_is_overloaded"
        assert failed["attributes"]["gen_ai.response.finish_reasons"] == ["error"]
        await gateway.traces.export.close()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"messages": 3}, "invalid_request_error"),
        ({"text": "#reject"}, "invalid_request_error"),
        ({"text": "long " * 200}, "context_length_exceeded"),
        ({"text": "#fail #say Hello and more"}, "server_is_overloaded"),
        ({"text": "x", "n": 99}, "invalid_request_error"),
    ],
)
@on_a_loop
async def test_a_refusal_is_a_span_with_the_code_that_the_client_gets(body, error):
    with Collector() as collector:
        gateway = service(collector)
        text = body.pop("text", "")
        assert (await gateway.ask(text, **body)).status_code >= 400
        span = await following(collector)
        assert span["status"] == {"code": 2}
        assert span["attributes"]["error.type"] == error
        assert span["attributes"]["gen_ai.request.model"] == "policy"
        await gateway.traces.export.close()


@on_a_loop
async def test_what_has_no_valid_key_or_is_not_sampled_by_its_client_is_no_span():
    with Collector() as collector:
        gateway = service(collector)
        assert (await gateway.ask("a", {"authorization": "Bearer other"})).status_code == 401
        await gateway.ask("a", {"traceparent": f"00-{TRACE}-{PARENT}-00"})
        await gateway.ask("#say last", model="last")
        assert (await following(collector))["name"] == "chat last"
        await gateway.traces.export.close()


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "x",
        f"00-{TRACE}-{PARENT}",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01\x00",
        "0" * 10_000,
    ],
)
def test_a_parent_that_cannot_be_read_begins_a_trace(parent):
    traces = Traces(TracesConfig(endpoint="http://127.0.0.1:9"), model="m", instance="i")
    span = traces.begin("v1/messages", {"traceparent": parent, "tracestate": "a=1"})
    assert span is not None and (span.parent, span.state) == ("", "") and span.trace != TRACE
    other = traces.begin("v1/messages", {})
    assert other is not None and {len(other.trace), len(other.id)} == {32, 16} and other.trace != span.trace


def test_a_parent_of_a_later_version_is_read_as_far_as_it_is_known():
    traces = Traces(TracesConfig(endpoint="http://127.0.0.1:9"), model="m", instance="i")
    span = traces.begin("generate", {"traceparent": f"01-{TRACE}-{PARENT}-03-more"})
    assert span is not None and (span.trace, span.parent) == (TRACE, PARENT)


@pytest.mark.parametrize("content", [False, True])
@on_a_loop
async def test_what_was_said_leaves_only_if_the_recipe_says_so_and_keys_never_do(monkeypatch, content):
    monkeypatch.setenv("COLLECTOR", "api-key=a%20b,x-team=t")
    with Collector() as collector:
        gateway = service(collector, content=content, headers_env="COLLECTOR")
        await gateway.ask(f"#say no {SECRET}\udce9".encode(errors="replace").decode(), user=SECRET)
        await gateway.ask("x", stop=SECRET, nonsense=[SECRET])
        await gateway.ask(SECRET * 100, model="too long")
        await gateway.http.post(CHAT, content=f'{{"messages": "{SECRET}"}}', headers={"x-other": SECRET})
        spans = [await following(collector) for _ in range(4)]
        await gateway.traces.export.close()
    sent = b"".join(body for _, body in collector.bodies).decode()
    assert (SECRET in sent) is content
    for hidden in ("key-anna", "anna", "a b", "COLLECTOR"):
        assert hidden not in sent
    assert {(head["api-key"], head["x-team"]) for head in collector.headers} == {("a b", "t")}
    if content:
        attributes = spans[0]["attributes"]
        [asked], [said] = (json.loads(attributes[f"gen_ai.{side}.messages"]) for side in ("input", "output"))
        assert asked == {"role": "user", "parts": [{"type": "text", "content": f"#say no {SECRET}?"}]}
        part = {"type": "text", "content": f"no {SECRET}?"}
        assert said == {"role": "assistant", "parts": [part], "finish_reason": "stop"}


@on_a_loop
async def test_a_reward_is_an_event_below_the_span_of_its_answer():
    with Collector() as collector:
        gateway = service(collector)
        answer = (await gateway.ask("#say Hello")).json()
        span = await following(collector)
        given = {"value": 0.25, "response_id": answer["id"], "name": "tests", "key": "once"}
        for _ in range(2):
            assert (await gateway.http.post("/rewards", json=given)).status_code == 200
        event = await following(collector)
        assert (event["eventName"], event["severityNumber"]) == ("gen_ai.evaluation.result", 9)
        assert (event["traceId"], event["spanId"]) == (span["traceId"], span["spanId"])
        assert event["attributes"] == {
            "gen_ai.evaluation.name": "tests",
            "gen_ai.evaluation.score.value": 0.25,
            "gen_ai.response.id": answer["id"],
            "gen_ai.conversation.id": answer["session_id"],
            "slipstream.reward.outcome": "counted",
        }
        await gateway.ask("#say more", model="after")
        assert (await following(collector))["name"] == "chat after", "sent again, it is no second event"
        await gateway.traces.export.close()


@on_a_loop
async def test_a_reward_of_an_answer_from_before_a_restart_names_it_without_a_span():
    with Collector() as collector:
        traces = Traces(TracesConfig(endpoint=collector.url), model="m", instance="i")
        traces.export._gather_s = 0.0
        traces.rewarded(TakenReward("s", [RewardedTurn("s", 0, "r1", 1.0)], [UserReward(1, 1.0)]))
        event = await following(collector)
        assert "spanId" not in event and event["attributes"]["gen_ai.response.id"] == "r1"
        assert event["attributes"]["gen_ai.evaluation.name"] == "reward"
        await traces.export.close()


# ---- the queue


def export(collector_url: str, **settings: Any) -> OtlpExport:
    resource = {"service.name": "test"}
    return OtlpExport(
        collector_url, {}, resource, scope="test", **{"gather_s": 0.0, "pause_s": 0.01} | settings
    )


def span(name: str = "x") -> dict[str, object]:
    now = str(1 << 61)
    ids = {"traceId": TRACE, "spanId": PARENT}
    return {
        **ids,
        "name": name,
        "startTimeUnixNano": now,
        "endTimeUnixNano": now,
        "kind": 3,
        "attributes": [],
    }


@on_a_loop
async def test_what_comes_while_the_queue_is_full_is_dropped_and_counted_and_nobody_waits():
    with Collector() as collector:
        collector.go_on.clear()
        sending = export(collector.url, most_bytes=2000)
        for _ in range(100):
            sending.put("resourceSpans", span())
        fits = 100 - sending.dropped["full"]
        assert 0 < fits < 20
        collector.go_on.set()
        for _ in range(fits):
            await following(collector)
        await sending.close()
        assert (sending.sent, sending.dropped["full"], sending.dropped["ended"]) == (fits, 100 - fits, 0)


@pytest.mark.parametrize("status", [429, 503])
@on_a_loop
async def test_a_collector_that_is_overloaded_gets_the_same_again(status):
    with Collector() as collector:
        for _ in range(2):
            collector.replies.put((status, {"retry-after": "0"}, b""))
        sending = export(collector.url)
        sending.put("resourceSpans", span("again"))
        assert (await following(collector))["name"] == "again"
        await sending.close()
        assert [body for _, body in collector.bodies] == [collector.bodies[0][1]] * 3
        assert (sending.sent, sending.dropped.total()) == (1, 0)


@pytest.mark.parametrize("status", [301, 401, 413, 500])
@on_a_loop
async def test_what_a_collector_refuses_is_dropped_and_never_sent_again(status):
    with Collector() as collector:
        collector.replies.put((status, {"location": "http://127.0.0.1:9/"}, b"<html>"))
        sending = export(collector.url)
        sending.put("resourceSpans", span("refused"))
        sending.put("resourceLogs", {**{k: span()[k] for k in ("traceId", "spanId", "attributes")}})
        await following(collector)
        await sending.close()
        assert (sending.sent, sending.dropped["refused"]) == (1, 1)
        assert [path for path, _ in collector.bodies] == ["/v1/traces", "/v1/logs"]


@pytest.mark.parametrize(
    ("reply", "rejected"),
    [
        (b'{"partialSuccess": {"rejectedSpans": "1", "errorMessage": "no"}}', 1),
        (b'{"partialSuccess": {"rejectedSpans": 99}}', 2),
        (b'{"partialSuccess": {}}', 0),
        (b'{"partialSuccess": null}', 0),
        (b"[]", 0),
        (b"", 0),
        (b'{"partialSuccess": {"rejectedSpans": "many"}}', 0),
        (b'{"partialSuccess": {"rejectedSpans": -3}}', 0),
    ],
)
@on_a_loop
async def test_what_a_collector_takes_in_part_is_counted_in_parts(reply, rejected):
    with Collector() as collector:
        collector.replies.put((200, {}, reply))
        sending = export(collector.url)
        for _ in range(2):
            sending.put("resourceSpans", span())
        for _ in range(2):
            await following(collector)
        await sending.close()
        assert (sending.sent, sending.dropped["refused"]) == (2 - rejected, rejected)


@on_a_loop
async def test_at_the_end_what_has_not_left_is_counted():
    sending = export("http://127.0.0.1:9", pause_s=60.0)
    sending.put("resourceSpans", span())
    await sending.close()
    sending.put("resourceSpans", span())
    assert (sending.sent, sending.dropped["ended"]) == (0, 2)
    await export("http://127.0.0.1:9").close()


@on_a_loop
async def test_figures_tell_what_has_become_of_spans():
    with Collector() as collector:
        gateway = service(collector)
        await gateway.ask("#say Hello")
        await following(collector)
        await gateway.traces.export.close()
        await gateway.ask("#say Hello")
        assert gateway.figures() == {
            "sent_total": 1.0,
            'dropped_total{reason="full"}': 0.0,
            'dropped_total{reason="refused"}': 0.0,
            'dropped_total{reason="ended"}': 1.0,
        }


@pytest.mark.parametrize("value", [None, "", " , ", "novalue", "=x", "a b=c", "a=x%0Ay", "n\u00e4me=x"])
def test_headers_that_are_missing_or_cannot_be_read_are_refused_without_their_values(monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("COLLECTOR", value)
    with pytest.raises(ValueError, match=r"gateway\.traces\.headers_env: .* COLLECTOR must hold") as refused:
        headers_of("COLLECTOR", "gateway.traces.headers_env")
    assert not value or value not in str(refused.value)


def test_headers_that_are_missing_are_told_before_the_run_begins(base, monkeypatch):
    monkeypatch.delenv("COLLECTOR", raising=False)
    traces = "gateway={traces: {endpoint: 'http://127.0.0.1:4318', headers_env: COLLECTOR}}"
    [problem] = plugin_problems(load_recipe(base, [traces]))
    assert problem.startswith("gateway.traces.headers_env: the environment variable COLLECTOR must hold")
    monkeypatch.setenv("COLLECTOR", "api-key=x")
    assert not plugin_problems(load_recipe(base, [traces]))


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4318", "ftp://x", "http://user:key@x", "http://x/?key=1", "http://x y"]
)
def test_an_address_that_is_none_or_holds_a_key_is_refused(endpoint):
    with pytest.raises(ValueError, match="endpoint"):
        GatewayConfig(traces=TracesConfig(endpoint=endpoint))
