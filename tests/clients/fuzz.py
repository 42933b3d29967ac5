"""Requests of every kind, valid and not, for every route of the gateway: none may make it fail.

    python -m tests.clients.fuzz --requests 10000 --seed 1
    python -m tests.clients.fuzz --values --requests 10000

Bodies come from the application's own OpenAPI document; most have some fields set to anything, some are
hostile: numbers and nestings without measure, halves of characters, bytes that are no text. The gateway is a
process with scripted tokens. Replies are read to their end. The last line is a JSON object; the exit code is
1 after a status of 500 and above, an exception in the application, a stream with an error, a reply that is
neither JSON nor events, or one that does not end.

With ``--values`` the bodies are well formed, and what they ask for is hostile: sampling values, grammars,
stops, long texts and tools. ``engines_lost`` counts the requests that have reached the source of tokens
although an engine's scheduler would end with them: computed here in float32, as SGLang does, and not by the
gateway's own bounds. ``loop_lag_p99_ms`` is how late the event loop of the gateway is.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.chat_model import write_chat_model
from tests.clients.openapi_bodies import bodies
from tests.clients.tools import CALLS, TOOLS, WEATHER
from tests.gateway_process import GatewayProcess

TIMEOUT_S = 30.0
"""Longest silence of the gateway. A request that takes longer hangs."""
SHOWN = 20
"""Failures that are shown in full."""
LIMITS = {"choices": 4, "body_bytes": 65_536, "messages": 64}

KEYS = ("Bearer key-anna", "Bearer key-berta", "Bearer key-side")
SAY = [{"role": "user", "content": "#say Hello"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
TURNS = [
    {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
    {"role": "user", "content": f"#chunk=3 #say {CALLS}"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "dry"},
    {"role": "user", "content": f"#chunk=5 #say {CALLS}"},
]
SEEDS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": SAY},
        {"messages": TURNS, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": SAY, "n": 2, "logprobs": True, "top_logprobs": 2, "seed": 3, "stop": ["l"]},
        {"messages": SAY, "tools": TOOLS, "tool_choice": "required", "max_tokens": 20},
        {"messages": SAY, "response_format": {"type": "json_object"}, "logit_bias": {"3": 1}},
    ],
    "/v1/completions": [
        {"prompt": "#say Hello", "max_tokens": 30},
        {"prompt": ["#say a", "#say b"], "max_tokens": 9, "stream": True, "echo": True, "logprobs": 1},
        {"prompt": [[64, 65], [66]], "n": 2, "max_tokens": 5},
    ],
    "/v1/responses": [
        {"input": "#say Hello"},
        {"input": SAY, "tools": [WEATHER], "stream": True, "instructions": "be brief"},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": f"#say {CALLS}"}]},
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "dry"},
            ],
            "store": False,
        },
    ],
    "/v1/messages": [
        {"model": "m", "messages": SAY, "max_tokens": 30},
        {
            "model": "m",
            "max_tokens": 300,
            "stream": True,
            "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": f"#say {CALLS}"}]}],
            "tools": [{"name": "weather", "input_schema": WEATHER["parameters"]}],
        },
    ],
    "/v1/messages/count_tokens": [{"model": "m", "messages": SAY}],
    "/generate": [
        {"text": "#say Hello"},
        {"input_ids": [[64, 65], [66]], "sampling_params": {"max_new_tokens": 3}, "stream": True},
        {"text": "#say a", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
    ],
    "/sessions/{session}/reward": [{"reward": 1, "turn": 0}],
    "/abort_request": [{"rid": "0"}],
}
"""Valid bodies of each path, from which others are made."""

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


@dataclass(frozen=True)
class Case:
    """One request."""

    method: str
    path: str
    """Percent-encoded."""
    headers: Mapping[str, bytes]
    content: bytes


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


# ---- hostile values

NUMBERS = [
    0,
    -0.0,
    1,
    -1,
    0.5,
    2,
    1e-320,
    -1e-320,
    1e-45,
    1e-7,
    1e38,
    1e39,
    -1e39,
    1e308,
    2**31,
    2**63,
    -(2**31),
]
EVERY_TOKEN = range(265)
"""The vocabulary of the chat model."""
VALUES: dict[str, list[Any]] = {
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        NUMBERS,
    ),
    "top_k": [-1, 0, 1, 7, 2**30, 2**30 + 1, 2**31 - 1, 2**31, 2**63],
    "logit_bias": [
        *({str(token): value for token in EVERY_TOKEN} for value in (-1e39, 1e39, -100, 100, 0, -1e308)),
        *({"3": value} for value in NUMBERS),
        {"264": 1, "265": 1},
        {"-1": 1},
        {"٣": 1},
        {},
    ],
    "stop": [["x"] * 33, "x" * 257, ["l", ""], "", ["é" * 128] * 32, "x" * 50_000],
    "stop_token_ids": [[264], [265], [2**31], [-1], list(EVERY_TOKEN), [3] * 65, []],
    "regex": ["a+", "(" * 70 + ")" * 70, "(a|b)" * 4_000, "[", "(?!a)", ""],
    "ebnf": ['root ::= "a"', "root ::= root", '"a"' * 9_000, "x"],
    "min_tokens": [0, 1, 5, 2**31, -1],
    "ignore_eos": [True, False],
}
"""By their names in a chat request."""
NATIVE_VALUES: dict[str, list[Any]] = {
    **{name: values for name, values in VALUES.items() if name != "min_tokens"},
    "min_new_tokens": [0, 1, 5, 2**31],
    "stop_regex": [
        "a",
        "(a+)+$",
        "(a|aa){1,50}b",
        "a?" * 60 + "a" * 60,
        "(?=.*x)",
        "[a-z]{1,9}",
        "[",
        [],
        "\\b",
    ],
    "json_schema": ["{}", '{"items":' * 70 + "{}" + "}" * 70, '{"type":"string","x":"' + "x" * 66_000 + '"}'],
    "sampling_seed": [0, 2**63 - 1, -(2**63), 2**63],
}
LONG: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "word " * 12_000}]},
    {"messages": [{"role": "user", "content": "a" * 60_000}]},
    {
        "messages": SAY,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "parameters": {
                        "type": "object",
                        "properties": {str(number): {"type": "string"} for number in range(1_500)},
                    },
                },
            }
        ],
    },
]


@st.composite
def valued(draw: st.DrawFn) -> Case:
    """A well-formed request with up to three hostile values, or a very long one."""
    path = draw(st.sampled_from(["/v1/chat/completions", "/v1/completions", "/generate"]))
    body = json.loads(json.dumps(draw(st.sampled_from(SEEDS[path]))))
    table = NATIVE_VALUES if path == "/generate" else VALUES
    names = draw(st.lists(st.sampled_from(sorted(table)), min_size=1, max_size=3, unique=True))
    values = {name: draw(st.sampled_from(table[name])) for name in names}
    if path == "/generate":
        body["sampling_params"] = body.get("sampling_params", {}) | values
    else:
        body |= values
        if path == "/v1/chat/completions" and draw(st.integers(0, 19)) == 0:
            body = draw(st.sampled_from(LONG))
    headers = {"authorization": draw(st.sampled_from(KEYS)).encode(), "content-type": b"application/json"}
    return Case("POST", path, headers, json.dumps(body).encode())


def ends_scheduler(sampling: Mapping[str, Any], vocabulary: int = len(EVERY_TOKEN)) -> bool:
    """Return True if SGLang's scheduler would end while it samples a token with these parameters."""
    try:
        top_k = torch.tensor([sampling.get("top_k") or -1], dtype=torch.int32)
        logits = torch.linspace(-5, 5, vocabulary)
        for token, value in (sampling.get("logit_bias") or {}).items():
            logits[int(token)] += torch.tensor(value, dtype=torch.float32)
        penalty = torch.tensor(sampling.get("repetition_penalty") or 1.0, dtype=torch.float32)
        logits = torch.where(logits < 0, logits * penalty, logits / penalty)
        if sampling.get("min_new_tokens"):
            logits[sorted(sampling.get("stop_token_ids") or [])] = -torch.inf
        temperature = torch.tensor(sampling.get("temperature") or 1.0, dtype=torch.float32)
        if sampling.get("temperature") and sampling["temperature"] >= 1e-6:
            logits = logits / temperature
        probabilities = torch.softmax(logits, 0)
        torch.multinomial(probabilities, 1)
    except (RuntimeError, IndexError, ValueError, OverflowError):
        return True
    expressions = sampling.get("stop_regex") or []
    expressions = [expressions] if isinstance(expressions, str) else expressions
    return bool(top_k[0] == 0) or any(re.search(r"[+*]|\?\?\)|\?a\?", text) for text in expressions)


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
        outcome.note(case, f"no end within {TIMEOUT_S:g} s of silence")
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


def fuzz(gateway: GatewayProcess, requests: int, first_seed: int, *, values: bool = False) -> Outcome:
    """Send so many requests, the same ones for the same seed. ``values``: well-formed ones, see above."""
    outcome = Outcome()
    document = gateway.control(openapi=True, release=True)["openapi"]
    with httpx.Client(base_url=gateway.url, timeout=TIMEOUT_S) as http:

        @seed(first_seed)
        @settings(
            max_examples=requests,
            derandomize=False,  # where CI is set, hypothesis would draw from a seed of its own
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(valued() if values else cases(document))
        def run(case: Case) -> None:
            if outcome.requests < requests:
                send(http, case, outcome)

        run()
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
    for problem in outcome.shown:
        print(problem, file=sys.stderr)
    print(outcome.as_json())
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
