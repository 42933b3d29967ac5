"""One client: names its session, sends requests, reads what comes back, and looks at what it can see."""

import asyncio
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.exactness.asgi import Exchange
from tests.exactness.dialects import Dialect
from tests.exactness.engines import ASKED_BY
from tests.exactness.gateway import Gateway
from tests.exactness.oracle import Asked, Oracle
from tests.exactness.prompts import PromptCheck
from tests.exactness.protocols import CHAT, GENERATE, Answered, Message, Protocol, Request

TURN_TIMEOUT_S = 120.0
REFUSALS = (
    "the script",
    "chat template",
    "roles must alternate",
    "roles are supported",
    "single tool-calls",
    "first question",
    "previous_response_id",
    "cannot be finished",
    "context length is",
    "prompt is too long",
    "exceeds the context window",
    "no engine has room",
    "no engine is free",
    "were lost while they ran this request",
)
"""Texts of refusals for which the script of a run gives reasons."""
ERROR = re.compile(r'"error": ?\{|event: (error|response\.failed)|"type": ?"abort"')
"""How the reply to a request ends that has failed behind its first byte. Quotes in answers are escaped."""
NEUTRAL = {"top_p": 1, "top_k": -1, "n": None, "max_tokens": None, "stop": None, "seed": None}
"""Sampling that the trainer can reproduce; None: with any value."""


@dataclass
class World:
    """The gateway under test and the parts of the harness that all clients use."""

    gateway: Gateway
    oracle: Oracle
    dialect: Dialect
    tokenizer: Any
    temperature: float
    overrides: bool
    """The gateway samples main turns as the recipe says, whatever a client asks for."""
    most_tokens: int | None = None
    """Length that clients ask for, at most; None: they mostly let answers end by themselves."""
    asked: int = 0
    talking: set[str] = field(default_factory=set[str])
    """Sessions of conversations that go on."""
    overlapping: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(12))

    def is_reproducible(self, sampling: dict[str, Any]) -> bool:
        """Return whether the trainer can reproduce how a request is sampled."""
        neutral = NEUTRAL | {"temperature": self.temperature, "logprobs": None, "top_logprobs": None}
        return self.overrides or all(
            name in neutral and neutral[name] in (None, value) for name, value in sampling.items()
        )


@dataclass
class Branch:
    """One history of a conversation, which ends with an answer."""

    messages: list[Message]
    response: tuple[str, int] | None = None
    """Its response and its number of messages, where /v1/responses has answered."""
    odd: bool = False
    """It has the beginning of an answer in the place of the answer."""


class Client:
    """A client with one key and one way of naming its session."""

    def __init__(self, world: World, number: int, draw: random.Random) -> None:
        self.world = world
        self.number = number
        self.draw = draw
        self.key = draw.choices(["key-anna", "key-berta", "key-side"], [8, 8, 1])[0]
        self.name = f"s{number}"
        self.naming = draw.choice(["header", "path", "body", "other header", "history", "history"])
        self.session: str | None = None
        """As the gateway has named it."""
        self.sessions: set[str] = set()
        """All that the gateway has named."""
        self.branches: list[Branch] = []
        self._prompts = PromptCheck(world.tokenizer, world.oracle)

    def asked(self, request: Request, history: Sequence[Message]) -> Asked:
        """Note a request that is about to be sent."""
        world = self.world
        world.asked += 1
        is_side = request.more.get("turn_type") == "side" or self.key == "key-side"
        asked = Asked(
            world.asked,
            is_main=not is_side and world.is_reproducible(request.sampling),
            has_stops="stop" in request.sampling,
            messages=list(history),
        )
        world.oracle.asked[asked.number] = asked
        return asked

    async def send(
        self,
        protocol: Protocol,
        request: Request,
        branch: Branch,
        history: list[Message],
        *,
        leave_after: int | None = None,
        headers: dict[str, str] | None = None,
        early: asyncio.Future[str] | None = None,
        asked: Asked | None = None,
    ) -> Answered | None:
        """Send a request, and note what comes back; None: no whole answer.

        ``history``: the request's messages as the client knows them, all of reasoning included; it goes on
        behind ``branch``. ``leave_after``: number of parts after which the client goes. ``early`` gets the
        beginning of the answer as soon as there is one.
        """
        prefix, named, fields = self._names(protocol)
        body = protocol.body(replace(request, more=request.more | fields))
        asked = asked or self.asked(request, history)
        self._prompts.sent(request.messages)
        ASKED_BY.set(asked.number)
        exchange = Exchange(self.world.gateway, prefix + protocol.path, body, {**named, **(headers or {})})
        async with asyncio.timeout(TURN_TIMEOUT_S), exchange:
            if leave_after is not None and not request.stream:
                for _ in range(leave_after * 3):
                    await asyncio.sleep(0)
                exchange.leave()
                asked.outcome = "left"
                return None
            if await exchange.started() != 200:
                self._refused(asked, exchange.status, (await exchange.body()).decode(), body)
                return None
            self._placed(asked, exchange.headers.get("x-session-id", ""))
            text = await self._read(exchange, protocol, asked, leave_after, early)
            if text is None:
                return None
            answered = protocol.read_stream(text) if request.stream else protocol.read(text.encode())
        asked.outcome = "answered"
        asked.texts = [message["content"].strip() for message in answered.messages]
        if protocol is GENERATE:
            self._check_raw(asked, answered)
        if request.messages:
            self._continue(asked, request, branch, history, answered)
        return answered

    def _names(self, protocol: Protocol) -> tuple[str, dict[str, str], dict[str, Any]]:
        """Return the beginning of the path, headers and fields that name user and session."""
        is_bearer = self.draw.random() < 0.5
        headers = {"authorization": f"Bearer {self.key}"} if is_bearer else {"x-api-key": self.key}
        naming = "body" if self.naming == "path" and protocol is GENERATE else self.naming
        match naming:
            case "path":
                return f"/sessions/{self.name}", headers, {}
            case "header":
                return "", headers | {"x-session-id": self.name}, {}
            case "other header":
                return "", headers | {"x-session-affinity": self.name}, {}
            case "body":
                return "", headers, {"session_id": self.name}
            case _:
                return "", headers, {}

    def _placed(self, asked: Asked, session: str) -> None:
        """Note in which session the gateway has placed a request."""
        self.session = asked.session = session
        self.sessions.add(session)
        self.world.talking.add(session)

    async def _read(
        self,
        exchange: Exchange,
        protocol: Protocol,
        asked: Asked,
        leave_after: int | None,
        early: asyncio.Future[str] | None,
    ) -> str | None:
        """Return the body of a reply; None if the client has gone, or the reply has broken off."""
        text, count = "", 0
        async for part in exchange.parts():
            text += part.decode()
            count += 1
            if leave_after is not None and count > leave_after:
                exchange.leave()
                asked.outcome = "left"
                return None
            if early is not None and not early.done() and (beginning := protocol.text_of_part(text)):
                early.set_result(beginning)
        if ERROR.search(text):
            is_partial = protocol is GENERATE and "[DONE]" in text
            asked.outcome = "partial" if is_partial else "broken"
            if not any(reason in text for reason in REFUSALS):
                self.world.oracle.findings.wrong("wrong_answers", f"a stream has failed: {text[-500:]}")
            return None
        return text

    def _refused(self, asked: Asked, status: int, text: str, body: object) -> None:
        """Note a refusal, which must be for a reason that the script gives."""
        asked.outcome = "refused"
        is_failure = status >= 500 and status not in (503, 529)
        if is_failure or not any(reason in text for reason in REFUSALS):
            self.world.oracle.findings.wrong("wrong_answers", f"{status} {text[:500]} for {body}")

    def _continue(
        self, asked: Asked, request: Request, branch: Branch, history: list[Message], answered: Answered
    ) -> None:
        """Keep the histories that end with the answers."""
        if not branch.odd:
            self._prompts.check(asked, request, history)
        for message in answered.messages:
            messages = [*history, message]
            self._prompts.answered(asked, messages, is_odd=self._is_odd(asked))
            response = None if answered.response is None else (answered.response, len(messages))
            self.branches.append(Branch(messages, response, branch.odd))

    def _is_odd(self, asked: Asked) -> bool:
        """Return whether an answer has ended with something that the template does not write."""
        records = self.world.oracle.records.asked_by(asked.number)
        end = self.world.tokenizer.eos_token_id
        # Without a record, it is the answer to an earlier request, which this one has joined.
        return not records or any(not record.tokens or record.tokens[-1] != end for record in records)

    def _check_raw(self, asked: Asked, answered: Answered) -> None:
        """Compare ids and log-probs of /generate with those of the engines."""
        records = self.world.oracle.records.asked_by(asked.number)
        for part in answered.raw:
            ids = part["output_ids"]
            logprobs = [row[0] for row in part["meta_info"]["output_token_logprobs"]]
            if not any(
                record.tokens[: len(ids)] == ids and record.logprobs[: len(ids)] == logprobs
                for record in records
            ):
                self.world.oracle.findings.wrong("wrong_answers", f"{part} is of no record")

    # ---- what is no turn

    async def reward(self) -> None:
        """Reward a turn of the session."""
        if self.session is None:
            return
        body = {"reward": self.draw.choice([1, -1, 0.5]), **self.draw.choice([{}, {"turn": 0}, {"turn": 1}])}
        headers = {"authorization": f"Bearer {self.key}"}
        path = f"/sessions/{self.session}/reward"
        async with Exchange(self.world.gateway, path, body, headers) as exchange:
            if await exchange.started() not in (200, 202, 404, 409):
                self.world.oracle.findings.wrong("wrong_answers", f"{exchange.status} for a reward")

    async def count(self, protocol: Protocol, request: Request) -> None:
        """Ask how many tokens a request of Anthropic's protocol has."""
        body = protocol.body(request)
        body = {name: body[name] for name in ("model", "messages", "system", "tools") if name in body}
        path, headers = "/v1/messages/count_tokens", {"x-api-key": self.key}
        async with Exchange(self.world.gateway, path, body, headers) as exchange:
            status, text = await exchange.started(), (await exchange.body()).decode()
        if status != 200:
            self._refused(Asked(0, is_main=False), status, text, body)
        elif json.loads(text)["input_tokens"] < 1:
            self.world.oracle.findings.wrong("wrong_answers", text)

    def says_all(self, protocol: Protocol, request: Request) -> bool:
        """Return whether a protocol can say what a request says."""
        roles = [message["role"] for message in request.messages]
        calls = [call for message in request.messages for call in message.get("tool_calls") or ()]
        return protocol is CHAT or (
            all(_is_object(call["function"]["arguments"]) for call in calls)
            and "system" not in roles[1:]
            and roles[-1] != "assistant"
        )


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False
