"""Requests as spans, and rewards as events, by OpenTelemetry's conventions for generative AI.

    request ──► begin ──► answered ──► end ──► span `chat MODEL`          child of the client's traceparent
    reward  ──► rewarded ─────────────────────► gen_ai.evaluation.result  child of the span of its answer

A span is a call of the policy, from the arrival of the request to its last byte. What was said is in it only
if the recipe asks for it, and keys and their names never are.

Source: https://github.com/open-telemetry/semantic-conventions-genai (docs/gen-ai), and for traceparent
https://www.w3.org/TR/trace-context
"""

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.configs.schema import TracesConfig
from slipstream.rollout.gateway.conversations import ChatMessage, TakenReward
from slipstream.rollout.gateway.otlp import HEADERS, Attribute, OtlpExport, attributes, headers_of
from slipstream.rollout.gateway.serving.call import LiveCall
from slipstream.rollout.gateway.serving.running import RunningAnswer
from slipstream.rollout.system.steady_clock import steady_s
from slipstream.rollout.tokens.trajectory import Finish
from slipstream.rollout.tokens.turn_entries import UserReward

OPERATIONS = {
    "v1/chat/completions": ("chat", "chatcmpl-"),
    "v1/completions": ("text_completion", "cmpl-"),
    "v1/responses": ("chat", "resp_"),
    "v1/messages": ("chat", "msg_"),
    "generate": ("text_completion", ""),
}
"""By endpoint: the operation, and the beginning of the ids of its answers."""

MOST_ANSWERS = 10_000
"""Answers whose spans are remembered for their rewards."""

LONGEST_CONTENT = 131_072
"""Characters of messages in a span. Of a longer history the last messages are kept."""

LONGEST_SPAN_NAME = 256
"""Characters of the name of a span, which has the model in it that the request names."""

CLIENT = 3
"""Kind of a span that calls a model in another process."""

ERROR = 2
"""Status of a span that has ended in an error."""

INFO = 9
"""Severity of an event."""

CANCELLED = "cancelled"

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[ -~]{1,512}")

_SAMPLING = {
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "frequency_penalty": ("frequency_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "top_k": ("top_k", float),
    "max_new_tokens": ("max_tokens", int),
    "sampling_seed": ("seed", int),
}
"""By SGLang's name of a parameter: its name and type in a span."""


@dataclass(slots=True)
class RequestSpan:
    """A request that has not ended."""

    trace: str
    id: str
    parent: str
    """Id of the client's span; empty: the client has none."""
    state: str
    """The client's tracestate."""
    prefix: str
    """Beginning of the ids of answers."""
    began_ns: int
    began_s: float
    values: dict[str, Attribute]
    content: dict[str, str] = field(default_factory=dict[str, str])
    """Messages as JSON, by attribute."""


class Traces:
    """The spans and events of a process."""

    def __init__(self, config: TracesConfig, *, model: str, instance: str) -> None:
        """``model``: its name for clients. ``instance``: name of the process.

        Raises ValueError if the environment lacks the headers of the collector.
        """
        headers = headers_of(config.headers_env, HEADERS)
        resource = {"service.name": "slipstream-gateway", "service.instance.id": instance}
        self.export = OtlpExport(config.endpoint, headers, resource, scope="slipstream.gateway")
        self._model = model
        self._has_content = config.content
        self._spans: dict[str, tuple[str, str, str]] = {}
        """By the id of a request: trace, span and id of its answer."""

    def begin(self, endpoint: str, headers: Mapping[str, str]) -> RequestSpan | None:
        """Return the span of a request; None: the client has decided that its trace is not recorded."""
        parent = _PARENT.fullmatch(headers.get("traceparent", "").strip())
        if parent is not None and not int(parent[3], 16) & 1:
            return None
        state = headers.get("tracestate", "") if parent is not None else ""
        operation, prefix = OPERATIONS[endpoint]
        return RequestSpan(
            trace=secrets.token_hex(16) if parent is None else parent[1],
            id=secrets.token_hex(8),
            parent="" if parent is None else parent[2],
            state=state if _STATE.fullmatch(state) else "",
            prefix=prefix,
            began_ns=time.time_ns(),
            began_s=steady_s(),
            values={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "slipstream",
                "gen_ai.request.model": self._model,
            },
        )

    def asked(self, span: RequestSpan, body: Mapping[str, object]) -> None:
        """Note what a request asks for."""
        if isinstance(model := body.get("model"), str) and model:
            span.values["gen_ai.request.model"] = model
        if body.get("stream") is True:
            span.values["gen_ai.request.stream"] = True

    def first_chunk(self, span: RequestSpan) -> None:
        """Note that the answer of a stream begins."""
        span.values["gen_ai.response.time_to_first_chunk"] = steady_s() - span.began_s

    def answered(self, span: RequestSpan, call: LiveCall) -> None:
        """Note what a request was answered, before its answers are left."""
        if call.session is not None:
            span.values["gen_ai.conversation.id"] = call.session
        if not call.answers:
            return
        id_ = f"{span.prefix}{call.answer_id}"
        self._spans.setdefault(call.answer_id, (span.trace, span.id, id_))
        if len(self._spans) > MOST_ANSWERS:
            del self._spans[next(iter(self._spans))]
        span.values |= _sampling(call.answers[0].request.sampling)
        choices = len(call.answers) // len(call.prompts)
        if choices != 1:
            span.values["gen_ai.request.choice.count"] = choices
        prompts = {id(answer.request): answer for answer in call.answers}.values()
        messages = [*call.messages, *[{}] * (len(call.answers) - len(call.messages))]
        reasons = [_reason(*both) for both in zip(call.answers, messages, strict=True)]
        span.values |= {
            "gen_ai.response.id": id_,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.usage.input_tokens": sum(len(answer.request.input_ids) for answer in prompts),
            "gen_ai.usage.cache_read.input_tokens": sum(answer.cached_tokens for answer in prompts),
            "gen_ai.usage.output_tokens": sum(len(answer.tokens) for answer in call.answers),
            "slipstream.policy_versions": sorted({v for a in call.answers for v, _ in a.spans}),
        }
        if self._has_content:
            span.content = _content(call, messages, reasons)

    def end(self, span: RequestSpan, error: str) -> None:
        """Send a span. ``error``: code or type of the error that the client got; empty: none."""
        took_ns = int((steady_s() - span.began_s) * 1e9)
        values = span.values | ({"error.type": error} if error else {})
        given: dict[str, object] = {
            "traceId": span.trace,
            "spanId": span.id,
            "name": f"{values['gen_ai.operation.name']} {values['gen_ai.request.model']}"[:LONGEST_SPAN_NAME],
            "kind": CLIENT,
            "startTimeUnixNano": str(span.began_ns),
            "endTimeUnixNano": str(span.began_ns + took_ns),
            "attributes": attributes(values) + attributes(span.content, longest=None),
        }
        for name, value in (("parentSpanId", span.parent), ("traceState", span.state)):
            if value:
                given[name] = value
        if error:
            given["status"] = {"code": ERROR}
        self.export.put("resourceSpans", given)

    def rewarded(self, given: TakenReward) -> None:
        """Send an event for each turn that a client's reward goes to. One that was given before has none."""
        now = str(time.time_ns())
        for turn, entry in zip(given.turns, given.entries, strict=False):
            trace, span, id_ = self._spans.get(turn.request, ("", "", turn.request))
            values: dict[str, Attribute] = {
                "gen_ai.evaluation.name": (isinstance(entry, UserReward) and entry.name) or "reward",
                "gen_ai.evaluation.score.value": float(turn.value),
                "gen_ai.response.id": id_,
                "gen_ai.conversation.id": turn.session,
                "slipstream.reward.outcome": turn.outcome or "recorded",
            }
            event: dict[str, object] = {
                "timeUnixNano": now,
                "observedTimeUnixNano": now,
                "severityNumber": INFO,
                "eventName": "gen_ai.evaluation.result",
                "attributes": attributes(values),
            }
            self.export.put("resourceLogs", event | ({"traceId": trace, "spanId": span} if trace else {}))


def _sampling(parameters: Mapping[str, object]) -> dict[str, Attribute]:
    """Return the sampling parameters of a request that say something. SGLang's top_k -1 is none."""
    found: dict[str, Attribute] = {}
    for theirs, (name, kind) in _SAMPLING.items():
        value = parameters.get(theirs)
        if isinstance(value, int | float) and not (theirs == "top_k" and value < 1):
            found[f"gen_ai.request.{name}"] = kind(value)
    return found


def _reason(answer: RunningAnswer, message: ChatMessage) -> str:
    if answer.finish is None or answer.is_aborted:
        return "error" if answer.failure is not None else CANCELLED
    if answer.finish.finish is Finish.STOP and message.get("tool_calls"):
        return "tool_call"
    return answer.finish.finish.value


# ---- what was said


def _content(call: LiveCall, messages: Sequence[ChatMessage], reasons: Sequence[str]) -> dict[str, str]:
    """Return the messages of a request and of its answers as JSON."""
    given = [
        message
        for prompt in call.prompts
        for message in (prompt.messages or [{"role": "user", "content": prompt.text or ""}])
    ]
    said = [
        _message({"role": "assistant", "content": answer.text, **message}) | {"finish_reason": reason}
        for answer, message, reason in zip(call.answers, messages, reasons, strict=True)
    ]
    return {
        "gen_ai.input.messages": _json(_last(given)),
        "gen_ai.output.messages": _json(said),
    }


def _last(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """Return the last messages that have room together. The last one is always there."""
    kept: list[dict[str, object]] = []
    room = LONGEST_CONTENT
    for message in reversed(messages):
        read = _message(message)
        room -= len(_json(read))
        if kept and room < 0:
            break
        kept.append(read)
    return kept[::-1]


def _message(message: ChatMessage) -> dict[str, object]:
    """Return a message with its parts, by the JSON schemas of the conventions."""
    content = message.get("content")
    texts = (
        [content]
        if isinstance(content, str)
        else [str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content or ()]
    )
    if message.get("role") == "tool":
        response = "".join(texts)[:LONGEST_CONTENT]
        part = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": response}
        return {"role": "tool", "parts": [part]}
    parts: list[dict[str, object]] = []
    if reasoning := message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": str(reasoning)[:LONGEST_CONTENT]})
    for text in filter(None, texts):
        parts.append({"type": "text", "content": text[:LONGEST_CONTENT]})
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts.append(
            {
                "type": "tool_call",
                "id": call.get("id"),
                "name": str(function.get("name")),
                "arguments": function.get("arguments"),
            }
        )
    return {"role": str(message.get("role", "user")), "parts": parts}


def _json(value: object) -> str:
    # Arguments that the policy has written may hold halves of surrogate pairs, which are no UTF-8.
    return json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace").decode()
