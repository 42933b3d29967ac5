"""Valid requests of a gateway's users, and well-formed ones that ask for hostile values."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from tests.clients.tools import CALLS, TOOLS, WEATHER

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


@dataclass(frozen=True)
class Case:
    """One request."""

    method: str
    path: str
    """Percent-encoded."""
    headers: Mapping[str, bytes]
    content: bytes


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
SHORT = {"max_new_tokens": 40}
"""Else an engine would fill its context."""
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
def valued(draw: st.DrawFn, keys: Sequence[str] = KEYS) -> Case:
    """A well-formed request with up to three hostile values, or a very long one."""
    path = draw(st.sampled_from(["/v1/chat/completions", "/v1/completions", "/generate"]))
    body = json.loads(json.dumps(draw(st.sampled_from(SEEDS[path]))))
    table = NATIVE_VALUES if path == "/generate" else VALUES
    names = draw(st.lists(st.sampled_from(sorted(table)), min_size=1, max_size=3, unique=True))
    values = {name: draw(st.sampled_from(table[name])) for name in names}
    if path == "/generate":
        body["sampling_params"] = SHORT | body.get("sampling_params", {}) | values
    else:
        body = {"max_tokens": SHORT["max_new_tokens"]} | body | values
        if path == "/v1/chat/completions" and draw(st.integers(0, 19)) == 0:
            body = draw(st.sampled_from(LONG))
    headers = {"authorization": draw(st.sampled_from(keys)).encode(), "content-type": b"application/json"}
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
