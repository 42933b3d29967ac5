"""The gateway's handling of requests with one endpoint of chats, which needs no SGLang.

The endpoint renders messages in the words of the scripted source (``tests/scripted_source.py``), and answers
with texts in place of choices. Keys, sessions, rewards, limits and traces are those of a gateway process.
"""

import itertools
import json
from typing import Any

import httpx
from fastapi import FastAPI
from pydantic import BaseModel

from slipstream.configs.schema import LimitsConfig, TracesConfig
from slipstream.rollout.gateway.serving.app import ModelCard, create_app
from slipstream.rollout.gateway.serving.call import LiveCall, SharedParts
from slipstream.rollout.gateway.serving.contents import AnswerContents, Form
from slipstream.rollout.gateway.serving.handling import RequestHandler
from slipstream.rollout.gateway.serving.metrics import ServingMetrics
from slipstream.rollout.gateway.serving.preferences import Abilities
from slipstream.rollout.gateway.serving.running import RunningTurns
from slipstream.rollout.gateway.serving.schema import Endpoint, Reading
from slipstream.rollout.gateway.serving.session_routes import SessionRoutes
from slipstream.rollout.gateway.serving.traces import Traces
from slipstream.rollout.gateway.serving.words import Protocols
from slipstream.rollout.gateway.serving.workers import Workers
from tests.scripted_source import ScriptedSource
from tests.unit.talking import decode, encode
from tests.watched_sessions import FixedKeys, MemoryLog, WatchedSessions

ANNA, BERTA = ({"authorization": f"Bearer key-{name}"} for name in ("anna", "berta"))
CHAT = "/v1/chat/completions"


class Bytes:
    """A tokenizer whose end is one token."""

    def encode(self, text: str) -> list[int]:
        return [260] if text == "<|im_end|>" else encode(text)

    def decode(self, token_ids, **_settings: Any) -> str:
        return decode([token for token in token_ids if token != 260])


class Markers:
    """A chat template in the words of the scripted source."""

    def render(self, messages, *, answer: bool) -> str:
        parts = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
        return "".join(parts) + "<|im_start|>assistant\n" * answer

    def encode(self, text: str) -> list[int]:
        return encode(text)


class Body(BaseModel):
    messages: list[dict[str, Any]]
    stream: bool = False
    temperature: float = 1.0
    n: int = 1


async def answer_chat(call: LiveCall, body: Body):
    template = Markers()
    prompt = call.prompt(None, body.messages, template.render(body.messages, answer=True), template)
    call.begin(prompt, {"temperature": body.temperature, "n": body.n, "max_new_tokens": 100, "top_k": -1})

    async def record() -> None:
        await call.record([{"role": "assistant", "content": answer.text} for answer in call.answers])

    async def events():
        async for part in call.contents(Form(call.answer_id, True, False, 0)):
            yield f"data: {json.dumps(part['text'])}\n\n"
        await record()

    if body.stream:
        return events()
    [_ async for _ in call.contents(Form(call.answer_id, False, False, 0))]
    await record()
    return {"id": f"chatcmpl-{call.answer_id}", "texts": [answer.text for answer in call.answers]}


class PlainGateway:
    """The application for users."""

    def __init__(self, config: TracesConfig | None = None) -> None:
        tokenizer, names = Bytes(), itertools.count(1)
        self.source = ScriptedSource(tokenizer)
        self._traces = None if config is None else Traces(config, model="policy", instance="run/gateway-0")
        self.conversations, self.entries = WatchedSessions(1.0, decode), MemoryLog()
        conversations, entries = self.conversations, self.entries
        turns = RunningTurns(self.source, conversations, entries)
        limits = LimitsConfig(body_bytes=65536, choices=4)
        shared = SharedParts(
            turns=turns,
            conversations=conversations,
            tokenizer=tokenizer,  # pyright: ignore[reportArgumentType]
            limits=limits,
            context=400,
            defaults={},
            check_sampling=lambda _: None,
            end_tokens=frozenset({260}),
            contents=AnswerContents(tokenizer, lambda: 4),  # pyright: ignore[reportArgumentType]
            entries=entries,
            workers=Workers(),
            vocab_size=500,
            longest_token=20,
            mint=lambda: f"{next(names):032x}",
        )
        self.metrics = ServingMetrics()
        if self._traces is not None:
            self._traces.export._gather_s = 0.0
            self.metrics.follow_export(self._traces.export)
        keys = FixedKeys()
        handler = RequestHandler(
            shared=shared,
            source=self.source,
            keys=keys,
            limits=limits,
            metrics=self.metrics,
            traces=self._traces,
        )
        known = {"messages": None, "stream": False, "temperature": 1.0, "n": 1, "model": "", "user": ""}
        endpoint = Endpoint(
            CHAT,
            Body,
            known,
            known,
            Protocols.OPENAI,
            answer_chat,
            Reading(Abilities(False, frozenset()), refuses_hosted=False, refuses_contents=False),
        )
        self.app: FastAPI = create_app(
            handler,
            SessionRoutes(handler, conversations, entries, lambda: 1.0, self._traces),
            [endpoint],
            ModelCard("policy", "/model", 400, 1),
            source=self.source,
            metrics=self.metrics,
            answers=lambda: turns.answers,
        )
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://gateway", headers=ANNA
        )

    @property
    def traces(self) -> Traces:
        assert self._traces is not None
        return self._traces

    async def ask(self, text: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], **body}
        return await self.http.post(CHAT, json=body, headers=headers or {})

    def figures(self) -> dict[str, float]:
        start = "slipstream_gateway_traces_"
        rows = [row for row in self.metrics.text().decode().splitlines() if row.startswith(start)]
        return {name.removeprefix(start): float(value) for name, value in map(str.split, rows)}
