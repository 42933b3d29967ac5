"""Requests of every kind, valid and not, for every route of the gateway: none may make it fail.

    python -m tests.clients.fuzz --requests 10000 --seed 1
    python -m tests.clients.fuzz --values --requests 10000

Bodies come from the application's own OpenAPI document; most have some fields set to anything, some are
hostile: numbers and nestings without measure, halves of characters, bytes that are no text. The gateway is a
process with scripted tokens. Replies are read to their end. The last line is a JSON object; the exit code is
1 after a status of 500 and above, an exception in the application, a stream with an error, a reply that is
neither JSON nor events, or one that does not end.

With ``--values`` the bodies are well formed, and what they ask for is hostile: sampling values, grammars,
stops, long texts and tools. A tenth as many are sent to a gateway with a real engine, too. ``engines_lost``
counts the requests that have reached the source of tokens although an engine's scheduler would end with them
(computed here in float32, as SGLang does, and not by the gateway's own bounds), and the real schedulers that
have ended. ``loop_lag_p99_ms`` is how late the event loop of the gateway with scripted tokens is.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.chat_model import write_chat_model
from tests.clients.hostile_values import KEYS, SEEDS, Case, ends_scheduler, valued
from tests.clients.openapi_bodies import bodies
from tests.crash.live import STARTED_S, recipe
from tests.environment import environment
from tests.gateway_process import GatewayProcess
from tests.ports import held_port
from tests.runs.conftest import LaunchedRun, RunProcess, run_command

TIMEOUT_S = 30.0
"""Longest silence of the gateway. A request that takes longer hangs."""
ENGINE_TIMEOUT_S = 180.0
"""The same where an engine fills its whole context."""
SHOWN = 20
"""Failures that are shown in full."""
LIMITS = {"choices": 4, "body_bytes": 65_536, "messages": 64}

HUGE = b"9" * 400
HOSTILE = [
    *(b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e-400", b"1e308", HUGE, b"-" + HUGE + b".5"),
    *(b"18446744073709551616", b"-9223372036854775809", b"2147483648", b"-1", b"-0.0", b"1.5", b"01"),
    *(b"null", b"true", b"{}", b"[]", b'""', b"undefined", b"'single'"),
    *(b"[" * depth + b"]" * depth for depth in (60, 600, 20_000)),
    *(b'{"a":' * depth + b"1" + b"}" * depth for depth in (60, 600, 8_000)),
    *(b'{"type":"array","items":' * depth + b"{}" + b"}" * depth for depth in (10, 300)),
    *(b'"\\ud800"', b'"\\udfff\\ud800"', b'"\xff\xfe"', b'"\xc3"', b'"\xed\xa0\x80"', b'"\x00"'),
    *(b'"\\u0000"', b'"#say \\u0000"', b'"#hold #say x"', b'"<|im_start|>"', b'"<tool_call>"', b'"<think>"'),
    b'"' + b"x" * 60_000 + b'"',
    b'"' + "😀é\u202e\u2028".encode() * 500 + b'"',
    *(b'"{{ 1/0 }}"', b'"%s%n"', b'"../../etc/passwd"', b'"http://127.0.0.1:1/"', b'"(a+)+$"', b'"["'),
    b'"data:image/png;base64,AAAA"',
]  # fmt: skip
"""JSON, or nearly, to be put into the place of any value."""
WHOLE = [
    *(b"", b" ", b"\x00", b"{", b"}", b"null", b"[]", b"1", b'"a"', b"\xff\xfe\x00", b"\xef\xbb\xbf{}"),
    *('{"messages": []}'.encode("utf-16"), b"a=b&c=d", b"{}{}", b"\x1f\x8b\x08\x00", b"[" * 60_000),
    *(b'{"messages": [], "messages": 1}', b'{"": 1, "\\u0000": 2}', b"x" * 70_000),
]
"""Bodies that are no object, or hardly one."""
TEXTS = ["", " ", "s", "t", "ü", "a/b", "..", "%00", "\x7f", "x" * 300, "resp_0", "null", "😀"]
HEADERS: dict[str, list[bytes]] = {
    "x-session-id": [b"s", b"t", b"", b"a b", b"\xff", "ü".encode(), b"x" * 300, b"7"],
    "session_id": [b"s", b"\xc3\xbc"],
    "x-session-affinity": [b"s", b"\x80"],
    "x-turn-type": [b"main", b"side", b"both", b"", b"\xff"],
    "x-session-done": [b"1", b"0", b"maybe", b"", b"\xff"],
    "x-stainless-retry-count": [b"1", b"99999", b"-1", b"x", b"\xb2", b"9" * 99],
    "content-type": [b"text/plain", b"multipart/form-data", b"", b"\xff", b"text/json; charset=utf-16"],
    "content-encoding": [b"gzip", b"br", b"x"],
    "authorization": [b"", b"Bearer", b"Bearer wrong", b"Basic a2V5", b"Bearer \xff", b"bearer key-anna"],
    "x-api-key": [b"key-berta", b"\xff", b""],
    "accept": [b"text/html"],
    "expect": [b"x"],
    "x-forwarded-for": [b"1.2.3.4"],
    "anthropic-version": [b"2023-06-01", b"\xff"],
    "x-data-parallel-rank": [b"1", b"x"],
    "x-smg-routing-key": [b"x", b"\xff"],
    "x-sglext-return-input-ids": [b"1"],
    "x-sglext-return-output-ids": [b"1"],
    "x-sglext-ids-framed": [b"1"],
}  # fmt: skip


@dataclass
class Outcome:
    """Everything that was sent and came back."""

    requests: int = 0
    failed: int = 0
    """Replies with a status of 500 and above."""
    unparsable: int = 0
    """Replies that are neither JSON nor events, or whose events are errors."""
    hung: int = 0
    exceptions: int = 0
    """Exceptions that the application has logged."""
    engines_lost: int = 0
    loop_lag_p99_ms: float = 0.0
    by_status: Counter[int] = field(default_factory=Counter[int])
    shown: list[str] = field(default_factory=list[str])

    @property
    def is_good(self) -> bool:
        return not (self.failed or self.unparsable or self.hung or self.exceptions or self.engines_lost)

    def note(self, case: Case, problem: str) -> None:
        if len(self.shown) < SHOWN:
            sent = case.content if len(case.content) < 1500 else case.content[:700] + case.content[-700:]
            self.shown.append(f"{problem}\n  {case.method} {case.path} {dict(case.headers)}\n  {sent!r}")

    def as_json(self) -> str:
        statuses = {str(status): self.by_status[status] for status in sorted(self.by_status)}
        return json.dumps(
            {
                "requests": self.requests,
                "status_5xx": self.failed,
                "engines_lost": self.engines_lost,
                "loop_lag_p99_ms": round(self.loop_lag_p99_ms, 1),
                "unparsable": self.unparsable,
                "hung": self.hung,
                "exceptions": self.exceptions,
                "by_status": statuses,
            }
        )


# ---- requests


@st.composite
def hostile(draw: st.DrawFn, valid: dict[str, Any]) -> bytes:
    """A valid body with something hostile in the place of one or two of its values."""
    body = json.loads(json.dumps(valid))
    mark = "@@{}@@"
    count = draw(st.integers(1, 2))
    for number in range(count):
        place: Any = body
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            inner = place[key]
            if isinstance(inner, dict | list) and inner and draw(st.integers(0, 2)):
                place = inner
                continue
            place[key] = mark.format(number)
            break
    text = json.dumps(body).encode()
    for number in range(count):
        text = text.replace(f'"{mark.format(number)}"'.encode(), draw(st.sampled_from(HOSTILE)))
    return text


def contents(document: dict[str, Any], path: str) -> st.SearchStrategy[bytes]:
    """Bodies for a path."""
    seeds = SEEDS[path]
    drawn = st.sampled_from(seeds).flatmap(lambda valid: bodies(document, path, valid))
    named = st.sampled_from(seeds).flatmap(
        lambda valid: st.fixed_dictionaries(
            {},
            optional={
                "session_id": st.sampled_from(["s", "t", "ü", 7, [], "x" * 300]),
                "turn_type": st.sampled_from(["main", "side", 1, "both"]),
                "session_done": st.sampled_from(["1", True, "maybe", {}]),
                "stream": st.booleans(),
                "previous_response_id": st.sampled_from(["resp_0", 1, "x", ""]),
            },
        ).map(lambda more: {**valid, **more})
    )
    encoded = st.one_of(drawn, drawn, named).map(lambda body: json.dumps(body).encode())
    broken = st.tuples(encoded, st.integers(0, 200), st.binary(max_size=3)).map(
        lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :]
    )
    return st.one_of(
        encoded,
        encoded,
        encoded,
        st.sampled_from(seeds).flatmap(hostile),
        st.sampled_from(seeds).flatmap(hostile),
        st.one_of(broken, st.sampled_from(WHOLE), st.binary(max_size=40)),
    )


def cases(document: dict[str, Any]) -> st.SearchStrategy[Case]:
    """Requests to all routes, most of them to those that generate."""
    routes = [
        (method.upper(), path)
        for path, operations in document["paths"].items()
        for method in operations
        if method in ("get", "post")
    ]
    posts = [(method, path) for method, path in routes if method == "POST"]
    odd = [("PUT", "/v1/models"), ("DELETE", "/v1/responses/resp_0"), ("POST", "/v1/nothing"), ("GET", "/")]
    odd += [(method, path) for _, path in routes[::3] for method in ("HEAD", "OPTIONS", "PATCH")]
    few = st.lists(st.sampled_from(sorted(HEADERS)), max_size=2, unique=True)

    @st.composite
    def one(draw: st.DrawFn) -> Case:
        kinds = [st.sampled_from(posts)] * 8 + [st.sampled_from(routes), st.sampled_from(odd)]
        method, path = draw(st.one_of(*kinds))
        headers: dict[str, bytes] = {
            "authorization": draw(st.sampled_from(KEYS)).encode(),
            "content-type": b"application/json",
        }
        if draw(st.integers(0, 2)) == 0:
            headers |= {name: draw(st.sampled_from(HEADERS[name])) for name in draw(few)}
        if draw(st.integers(0, 19)) == 0:
            headers["authorization"] = draw(st.sampled_from(HEADERS["authorization"]))
        content = b""
        if method == "POST":
            known = [each for each in (path, path.removeprefix("/sessions/{session}")) if each in SEEDS]
            content = draw(contents(document, known[0] if known else "/generate"))
        while "{" in path:
            before, _, rest = path.partition("{")
            text = draw(st.sampled_from("stuv") | st.sampled_from(TEXTS) | st.text(min_size=1, max_size=8))
            path = before + quote(text.encode("utf-8", "surrogatepass"), safe="") + rest.partition("}")[2]
        return Case(method, path, headers, content)

    return one()


# ---- replies


def send(http: httpx.Client, case: Case, outcome: Outcome) -> None:
    """Send a request, read its reply to the end, and note what is wrong with it."""
    outcome.requests += 1
    url = http.base_url.copy_with(raw_path=case.path.encode())
    request = httpx.Request(case.method, url, headers=list(case.headers.items()), content=case.content)
    try:
        reply = http.send(request)
    except httpx.TimeoutException:
        outcome.hung += 1
        outcome.note(case, f"no end within {http.timeout.read:g} s of silence")
        return
    except httpx.HTTPError as error:
        outcome.unparsable += 1
        outcome.note(case, f"the connection broke: {error!r}")
        return
    outcome.by_status[reply.status_code] += 1
    if reply.status_code >= 500:
        outcome.failed += 1
        outcome.note(case, f"{reply.status_code}: {reply.text[:300]}")
    elif (problem := problem_of(case, reply)) is not None:
        outcome.unparsable += 1
        outcome.note(case, f"{reply.status_code}: {problem}")


def problem_of(case: Case, reply: httpx.Response) -> str | None:
    """Return what is wrong with a reply; None: nothing."""
    kind = reply.headers.get("content-type", "").partition(";")[0]
    try:
        if case.method == "HEAD" or reply.status_code == 204:
            return f"a body: {reply.content[:100]!r}" if reply.content else None
        if kind == "application/json":
            json.loads(reply.content.decode())
            return None
        if kind == "text/event-stream":
            return problem_of_events(reply.content.decode())
        if kind == "text/plain" and case.path.endswith("/metrics"):
            list(text_string_to_metric_families(reply.text))
            return None
    except ValueError as error:
        return f"{error}: {reply.content[:300]!r}"
    return f"a body of the type {kind}: {reply.content[:300]!r}"


def problem_of_events(text: str) -> str | None:
    """Return what is wrong with a stream. Raises ValueError for what is no stream."""
    *events, rest = text.split("\n\n")
    if rest or not events:
        return f"the stream ends within an event, or has none: {rest[-300:]!r}"
    for event in events:
        lines = event.split("\n")
        named = all(line.startswith(("event: ", "data: ")) for line in lines)
        if not named or not lines[-1].startswith("data: "):
            return f"not an event: {event[:300]!r}"
        data = lines[-1].removeprefix("data: ")
        value = {} if data == "[DONE]" else json.loads(data)
        if value.get("error") or value.get("type") == "error":
            return f"the stream has an error: {event[:300]!r}"
    return None


def send_all(
    url: str,
    drawn: st.SearchStrategy[Case],
    requests: int,
    first_seed: int,
    outcome: Outcome,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Send so many requests, and note what comes of them."""
    last = outcome.requests + requests
    with httpx.Client(base_url=url, timeout=timeout_s) as http:

        @seed(first_seed)
        @settings(
            max_examples=requests,
            derandomize=False,  # where CI is set, hypothesis would draw from a seed of its own
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(drawn)
        def run(case: Case) -> None:
            if outcome.requests < last:
                send(http, case, outcome)

        run()


def fuzz(gateway: GatewayProcess, requests: int, first_seed: int, *, values: bool = False) -> Outcome:
    """Send so many requests, the same ones for the same seed. ``values``: well-formed ones, see above."""
    outcome = Outcome()
    document = gateway.control(openapi=True, release=True)["openapi"]
    send_all(gateway.url, valued() if values else cases(document), requests, first_seed, outcome)
    state = gateway.control()
    outcome.exceptions = len(state["exceptions"])
    outcome.loop_lag_p99_ms = state["lag_p99_ms"]
    for sampling in state["requests"] if values else ():
        if ends_scheduler(sampling):
            outcome.engines_lost += 1
            outcome.shown.append(f"it has reached the engine: {str(sampling)[:300]}")
    outcome.shown += state["exceptions"][:SHOWN]
    if state["running"]:
        outcome.hung += 1
        outcome.shown.append(f"{state['running']} answers still run")
    return outcome


def fuzz_engine(folder: Path, requests: int, first_seed: int, outcome: Outcome) -> None:
    """Send hostile values to ``slipstream serve``, whose engine samples from random weights."""
    port, key = held_port(), os.urandom(16).hex()
    served = recipe(folder, port, held_port())
    del served["live"], served["judge"]
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(served))
    with (folder / "output").open("w") as output:
        process = RunProcess(
            run_command("serve", str(file)), output, environment=environment(SGLANG_API_KEY=key)
        )
    run = LaunchedRun(process, folder)
    try:
        url = f"http://127.0.0.1:{port}"
        await_answer(url, key)
        before = run.pids_of("sglang::scheduler")
        send_all(url, valued([f"Bearer {key}"]), requests, first_seed, outcome, ENGINE_TIMEOUT_S)
        await_answer(url, key)
        lost = set(before) - set(run.pids_of("sglang::scheduler"))
    finally:
        run.end()
    if lost or not before:
        outcome.engines_lost += max(1, len(lost))
        outcome.shown.append(f"of the real schedulers {before} these have ended: {lost}")


def await_answer(url: str, key: str) -> None:
    """Wait until a gateway answers a user."""
    until_s = time.monotonic() + STARTED_S
    ask = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=TIMEOUT_S) as http:
        while True:
            with suppress(httpx.HTTPError):
                if http.post("/v1/chat/completions", json=ask).status_code == 200:
                    return
            if time.monotonic() > until_s:
                raise TimeoutError(f"no answer of {url} within {STARTED_S} s")
            time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--values", action="store_true", help="well-formed bodies with hostile values")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_chat_model(Path(folder), weights=False)
        with GatewayProcess(model, tool_parser="qwen25", reasoning_parser="qwen3", limits=LIMITS) as gateway:
            outcome = fuzz(gateway, arguments.requests, arguments.seed, values=arguments.values)
        if arguments.values:
            fuzz_engine(Path(folder), arguments.requests // 10, arguments.seed + 1, outcome)
    for problem in outcome.shown:
        print(problem, file=sys.stderr)
    print(outcome.as_json())
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
