"""One gateway with its driver, which agents reach over HTTP, and what was found in a scene.

    agent ──HTTP──► gateway ──► engines that follow a script (``tests.exactness``)
                       └──► driver: judged, trained ──► oracle

The policy answers by a word in what is said to it: ``SAY-NAME`` gets the answer of this name. Everything
else, and what is asked without tools by an agent that has some, is help: titles and summaries.
"""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.rollout.gateway.port import PortServer
from slipstream.rollout.ledger.audit.account import audit_ledger
from slipstream.rollout.reward.live import JudgedTurn
from slipstream.rollout.system.network import hold_port
from slipstream.rollout.tokens.trajectory import Messages
from tests.chat_model import END, START
from tests.exactness.__main__ import WRONG
from tests.exactness.dialects import DIALECTS, Call, Dialect, as_the_template_does
from tests.exactness.driver import Driver
from tests.exactness.engines import ASKED_BY, Fleet, Record, ScriptedEngines
from tests.exactness.gateway import Gateway, recipe
from tests.exactness.oracle import Asked, Oracle, text_of
from tests.exactness.policy import Policy

DIALECT = DIALECTS[0]
CONTEXT = 400_000
"""Tokens, which are bytes: instructions and tools of an agent have up to 150 thousand."""

TEMPERATURE = 0.9
SETTLE_S = 120.0
HELP = "A short summary of what was said."
ASSISTANT = f"{START}assistant\n"
SAID = re.compile(r"SAY-([a-z0-9]+)")
ANSWERED = re.compile(r"ANSWER-([a-z0-9]+)")


@dataclass(frozen=True)
class Step:
    """The policy's answer to one word of the script."""

    calls: Callable[[str], Sequence[Call]] = lambda _: ()
    """Returns what it calls, given what was said last."""
    says: str = ""
    """Text after the name of the answer."""
    then: str = ""
    """Text that the next state of the answer must have; empty: nothing follows."""
    is_apart: bool = False
    """A sub-agent says it, whose conversation may have a session of its own."""
    follow: str = ""
    """The answer to its next state, if that has no word; empty: help."""


class ScriptedPolicy(Policy):
    """Answers as the script says, each time in another tokenization."""

    def __init__(self, dialect: Dialect, tokenizer: Any, script: Mapping[str, Step], *, tools: bool) -> None:
        """``tools``: the agent has tools, so that a request without them is help."""
        super().__init__(dialect, tokenizer)
        self._script = script
        self._tools = tools

    def answer(self, draw: random.Random, prompt: Sequence[int]) -> list[int]:
        return [*self.spell(self._answered(self.text(prompt)), draw), self.end]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return str(self.tokenizer.decode(list(ids)))

    def _answered(self, prompt: str) -> str:
        before = prompt.removesuffix(ASSISTANT)
        last = before.rpartition(ASSISTANT)[2].partition(END)[2] if ASSISTANT in before else before
        if not self._tools and "ANSWER-" in last:  # it quotes the conversation
            return HELP
        words = [word for word in SAID.findall(last) if word in self._script]
        if not words and (answered := ANSWERED.findall(before.removesuffix(last))):
            words = [self._script[answered[-1]].follow]
        if not any(words) or (self._tools and "<tools>" not in prompt):
            return HELP
        step = self._script[words[-1]]
        text = f"ANSWER-{words[-1]} {step.says}".strip()
        assert self.dialect.calls is not None
        calls = self.dialect.calls(step.calls(last), as_the_template_does)
        return f"{text}\n{calls}" if calls else text


class World:
    """A gateway on loopback, and all that is behind it."""

    def __init__(self, folder: Path, script: Mapping[str, Step], *, tools: bool) -> None:
        self.folder = folder
        self.script = script
        tokenizer = DIALECT.write(folder / "model", CONTEXT)
        self._policy = ScriptedPolicy(DIALECT, tokenizer, script, tools=tools)
        self._fleet = Fleet(self._policy, seed=1, context=CONTEXT)
        self._fleet.trouble = 1e-9
        self._engines = ScriptedEngines(self._fleet, seed=1)
        self.oracle = Oracle(self._fleet.records)
        self.wire: list[dict[str, Any]] = []
        """Every request: path, status, session, and beginning of the body."""
        settings = {"tool_parser": DIALECT.tool_parser, "sampling": "recipe"}
        config = recipe(folder, folder / "model", settings, TEMPERATURE)
        self._gateway = Gateway(
            folder,
            config,
            context=CONTEXT,
            connect=self._fleet.connect,
            decode=tokenizer.decode,
            find=lambda: self._driver.address,
        )
        self._driver = Driver(
            folder / "run",
            vocab=len(tokenizer),
            engines=self._engines,
            judge=self._judge,
            trained=self.oracle.trained,
        )

    def _judge(self, turn: JudgedTurn, next_state: Messages) -> float:
        self.oracle.judged(turn, next_state)
        return 1.0

    async def start(self) -> str:
        """Begin to serve, and return the address."""
        await self._driver.start()
        await self._gateway.start()
        self._server = PortServer(self._noted, hold_port("127.0.0.1"))
        self._serving = asyncio.create_task(self._server.serve(), name="serving agents")
        async with asyncio.timeout(SETTLE_S):
            await self._server.is_listening.wait()
        return self._server.url

    async def _noted(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request, and note it as a client of ``tests.exactness`` would."""
        asked = Asked(len(self.wire) + 1, is_main=True, outcome="left")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        seen: dict[str, Any] = {"path": scope["path"], "headers": headers, "body": b""}
        self.wire.append(seen)
        self.oracle.asked[asked.number] = asked
        ASKED_BY.set(asked.number)

        async def heard() -> Any:
            message = await receive()
            seen["body"] += message.get("body", b"")
            return message

        async def said(message: Any) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
                headers = {name.lower(): value.decode() for name, value in message["headers"]}
                asked.session = headers.get(b"x-session-id")
            elif not message.get("more_body"):
                asked.outcome = "answered" if seen["status"] < 400 else "refused"
            seen["reply"] = seen.get("reply", b"") + message.get("body", b"")
            await send(message)

        await self._gateway(scope, heard, said)

    async def stop(self) -> None:
        """End all sessions, train what there is, and end."""
        await self._gateway.end_sessions()
        async with asyncio.timeout(SETTLE_S):
            await self._driver.settled()
        self._server.should_exit = self._server.force_exit = True
        await self._serving
        await self._gateway.stop()
        await self._driver.stop()

    # ---- what was found

    def wrong(self, pairs_of: Sequence[str]) -> list[str]:
        """Return what is not as it must be. ``pairs_of``: words of the script, in the order of the scene."""
        steps: dict[str, list[Record]] = {}
        helps: list[Record] = []
        for record in self._fleet.records.all:
            found = ANSWERED.match(self._policy.text(record.tokens))
            if found is None:
                helps.append(record)
            else:
                steps.setdefault(found[1], []).append(record)
        wrong: list[str] = []
        if (given := {word: len(records) for word, records in steps.items()}) != dict.fromkeys(pairs_of, 1):
            wrong.append(f"answers: expected each of {list(pairs_of)} once, found {given}")
        sessions = Counter(
            self.oracle.asked[record.asked_by].session
            for word, records in steps.items()
            for record in records
            if not self.script[word].is_apart
        )
        if len(sessions) != 1:
            wrong.append(f"one conversation became {len(sessions)} sessions: {dict(sessions)}")
        untrained = [
            word
            for word, records in steps.items()
            if not any(each.number in self.oracle.trained_records for each in records)
        ]
        if untrained:
            wrong.append(f"not trained: {untrained}")
        if helped := [record for record in helps if record.number in self.oracle.trained_records]:
            wrong.append(f"help was trained: {len(helped)} of {len(helps)} answers")
        return wrong + self._wrong_pairs(pairs_of) + self._wrong_training()

    def _wrong_pairs(self, words: Sequence[str]) -> list[str]:
        found: dict[str, str] = {}
        for turn, next_state in self.oracle.questions:
            for word in ANSWERED.findall(turn.text)[:1]:
                found[word] = " ".join(map(text_of, next_state))
        wrong: list[str] = []
        for word in words:
            then, got = self.script[word].then, found.get(word)
            if got is None or (then not in got if then else got):
                wrong.append(f"next state of {word}: expected {then or 'none'}, found {got and got[:200]!r}")
        return wrong

    def _wrong_training(self) -> list[str]:
        findings = asdict(self.oracle.findings)
        wrong = [f"{kind}: {findings[kind]}" for kind in WRONG if findings.get(kind)]
        audit = audit_ledger(self.folder / "run")[0]
        return [*wrong, *(self.oracle.findings.examples[:2] if wrong else ()), *audit.discrepancies]

    @property
    def branches(self) -> dict[str, int]:
        """Reasons of branches, and how often each has come."""
        return dict(sum((Counter(each.branches) for each in self._gateway.counters), Counter[str]()))
