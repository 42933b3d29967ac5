"""A collector of OpenTelemetry's that takes OTLP over HTTP in its JSON form, and refuses what breaks it.

Fields and types are those of opentelemetry-proto 1.9 (trace.proto, logs.proto, common.proto); what JSON adds
is in https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding.
"""

import json
import queue
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

WAIT_S = 60.0

_HEX = {"traceId": 32, "spanId": 16, "parentSpanId": 16}
_SPAN = {
    "traceId",
    "spanId",
    "parentSpanId",
    "traceState",
    "name",
    "kind",
    "startTimeUnixNano",
    "endTimeUnixNano",
    "attributes",
    "status",
}
_RECORD = {
    "timeUnixNano",
    "observedTimeUnixNano",
    "severityNumber",
    "eventName",
    "attributes",
    "traceId",
    "spanId",
}


def items_of(path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the spans or log records of a POST, with their attributes as a plain mapping.

    Raises AssertionError for what a collector could not read.
    """
    outer, inner, listed, fields = {
        "/v1/traces": ("resourceSpans", "scopeSpans", "spans", _SPAN),
        "/v1/logs": ("resourceLogs", "scopeLogs", "logRecords", _RECORD),
    }[path]
    assert set(body) == {outer}
    found: list[dict[str, Any]] = []
    for resource in body[outer]:
        assert set(resource) == {"resource", inner}
        assert _mapping(resource["resource"]["attributes"])["service.name"]
        for scope in resource[inner]:
            assert set(scope) == {"scope", listed} and scope["scope"]["name"]
            found += [_item(item, fields) for item in scope[listed]]
    return found


def _item(item: dict[str, Any], fields: set[str]) -> dict[str, Any]:
    assert not set(item) - fields, set(item) - fields
    for name, value in item.items():
        if name in _HEX:
            assert re.fullmatch(f"[0-9a-f]{{{_HEX[name]}}}", value) and int(value, 16), name
        elif name.endswith("UnixNano"):
            assert isinstance(value, str) and int(value) > 1 << 60, name
        elif name in ("kind", "severityNumber"):
            assert type(value) is int, name
        elif name == "status":
            assert value == {"code": 2}
    if "kind" in item:
        assert int(item["endTimeUnixNano"]) >= int(item["startTimeUnixNano"])
        assert {"traceId", "spanId", "name"} <= set(item)
    return item | {"attributes": _mapping(item["attributes"])}


def _mapping(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for attribute in attributes:
        assert set(attribute) == {"key", "value"} and attribute["key"] not in values, attribute
        values[attribute["key"]] = _value(attribute["value"])
    return values


def _value(value: dict[str, Any]) -> Any:
    [(kind, given)] = value.items()
    match kind:
        case "stringValue":
            assert isinstance(given, str)
        case "boolValue":
            assert isinstance(given, bool)
        case "intValue":
            assert isinstance(given, str)
            return int(given)
        case "doubleValue":
            assert type(given) in (int, float)
            return float(given)
        case "arrayValue":
            assert set(given) == {"values"}
            return [_value(one) for one in given["values"]]
        case _:
            raise AssertionError(f"there is no {kind}")
    return given


class Collector:
    """A server on loopback. It answers with what ``replies`` holds first, and then with 200."""

    def __init__(self) -> None:
        self.received: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        """Path and item of each span and each event."""
        self.headers: list[dict[str, str]] = []
        """Headers of each POST."""
        self.bodies: list[tuple[str, bytes]] = []
        self.replies: queue.Queue[tuple[int, dict[str, str], bytes]] = queue.Queue()
        self.go_on = threading.Event()
        self.go_on.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="collector", daemon=True
        )

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.go_on.wait(WAIT_S)
                status, headers, content = collector.taken(self.path, dict(self.headers.items()), body)
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing is written to the terminal of the tests."""

        return Handler

    def taken(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        self.headers.append({name.lower(): value for name, value in headers.items()})
        self.bodies.append((path, body))
        try:
            assert self.headers[-1]["content-type"] == "application/json"
            items = items_of(path, json.loads(body))
        except (AssertionError, KeyError, ValueError) as error:
            self.received.put(("wrong", {"error": repr(error), "body": body}))
            return 400, {}, b"{}"
        try:
            reply = self.replies.get_nowait()
        except queue.Empty:
            reply = (200, {}, b"{}")
        if reply[0] == 200:
            for item in items:
                self.received.put((path, item))
        return reply

    def next(self) -> dict[str, Any]:
        """Return the next item, a span or an event. Raises AssertionError for one that breaks the form."""
        path, item = self.received.get(timeout=WAIT_S)
        assert path != "wrong", item
        return item

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(WAIT_S)
