"""Engines that follow no weights, and write down what they were asked and what they have sampled.

The record of an engine is what the oracle believes: the ids that it was given, each id that it has sampled,
the log-prob that it has said for it, and the version that it has said. What a request has lost on its way,
because its engine was lost or aborted it, or because its weights were wrong, is taken out of the record again
when another engine goes on from what is left.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from slipstream.rollout.engine.client import EngineAddress, EngineError, EngineLost, RequestRefused
from slipstream.rollout.engine.completion import Aborted
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.sampling import LiveSampling
from slipstream.rollout.tokens.trajectory import Finish
from tests.exactness.dialects import CONTEXT
from tests.exactness.policy import Policy

ASKED_BY: ContextVar[int] = ContextVar("asked_by", default=-1)
"""Number of the client's request that an engine works for."""


@dataclass(eq=False)
class Record:
    """One completion, as the engines know it."""

    number: int
    asked_by: int
    prompt: tuple[int, ...]
    completion: GrowingCompletion
    """Kept, so that nobody else gets its identity."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    """In float32."""
    said: list[int] = field(default_factory=list[int])
    """Versions as the engine has said them: exact, or a lower bound if its last words were lost."""
    sampled_by: list[int] = field(default_factory=list[int])
    """Versions that each token was sampled from."""
    plan: list[int] = field(default_factory=list[int])
    finish: Finish | None = None
    losses: int = 0
    """Number of engines that were lost on the way."""

    def cut(self, tokens: int) -> None:
        """Forget all tokens from a place on."""
        for values in (self.tokens, self.logprobs, self.said, self.sampled_by):
            del values[tokens:]


class Records:
    """The records of all engines."""

    def __init__(self) -> None:
        self.all: list[Record] = []
        self._by_completion: dict[int, Record] = {}
        self._by_request: dict[int, list[Record]] = {}

    def asked_by(self, number: int) -> list[Record]:
        """Return the completions that a client's request has asked for."""
        return self._by_request.get(number, [])

    def of(self, prompt: Sequence[int], completion: GrowingCompletion) -> Record:
        """Return the record of a completion, which an engine is about to begin or to go on with."""
        record = self._by_completion.get(id(completion))
        if record is None:
            record = Record(len(self.all), ASKED_BY.get(), tuple(prompt), completion)
            self._by_completion[id(completion)] = record
            self._by_request.setdefault(record.asked_by, []).append(record)
            self.all.append(record)
        if record.prompt != tuple(prompt):
            raise AssertionError("a completion goes on behind another prompt")
        record.cut(len(completion.tokens))
        record.finish = None
        if record.tokens != completion.tokens.tolist():
            raise AssertionError("a completion goes on from tokens that no engine has sampled")
        return record


class Fleet:
    """All scripted engines. They hold the same version, as those of a run do."""

    def __init__(self, policy: Policy, seed: int, *, context: int = CONTEXT) -> None:
        self.policy = policy
        self.context = context
        self.records = Records()
        self.version = 0
        self.seed = seed
        self.trouble = 1.0
        """Factor of the probability that an engine is lost, aborts a request, or fails."""
        self._engines: dict[str, ScriptedEngine] = {}
        self._starts = 0

    def start(self) -> "ScriptedEngine":
        """Start an engine."""
        self._starts += 1
        name = f"engine-{self._starts}"
        address = EngineAddress(name, name, 1, len(self.policy.tokenizer), self.context, 60.0)
        engine = self._engines[name] = ScriptedEngine(self, address)
        return engine

    def connect(self, address: EngineAddress) -> "ScriptedEngine":
        """Return a connection with an engine, as a pool opens them."""
        return ScriptedEngine(self, address, self._engines[address.name].lost)


class ScriptedEngine:
    """An engine, or a connection with one: ``EngineClient``, as far as a pool and a roster know it."""

    def __init__(self, fleet: Fleet, address: EngineAddress, lost: asyncio.Event | None = None) -> None:
        self.address = address
        self.name = address.name
        self._fleet = fleet
        self.lost = lost or asyncio.Event()
        self._closed = asyncio.Event()

    async def close(self) -> None:
        self._closed.set()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: LiveSampling,
        completion: GrowingCompletion,
        *,
        greedy: bool = False,
        cache_key: str | None = None,
        version: int,
        grown: Callable[[], None] | None = None,
    ) -> None:
        record = self._fleet.records.of(input_ids, completion)
        draw = random.Random(f"{self._fleet.seed} {record.number} {len(completion.tokens)} {record.losses}")
        generation = _Generation(self, self._fleet, record, sampling, version, draw)
        trouble = draw.random() / self._fleet.trouble
        if trouble < 0.002:
            raise RequestRefused("the script refuses it")
        await self._pause(draw)
        while not generation.is_over:
            generation.sample(draw.choice([1, 1, 2, 3, 5, 8, 21]))
            if trouble < 0.03 and draw.random() < 0.3:
                self._end_with_trouble(generation, trouble, draw)
            if not generation.is_over:
                generation.hand_out()
                if grown is not None:
                    grown()
                await self._pause(draw)
        generation.end()

    async def _pause(self, draw: random.Random) -> None:
        for _ in range(draw.choice([1, 1, 2, 6])):
            await asyncio.sleep(0)
        if self.lost.is_set() or self._closed.is_set():
            raise EngineLost(f"{self.name} is gone")

    def _end_with_trouble(self, generation: "_Generation", trouble: float, draw: random.Random) -> None:
        generation.record.losses += 1
        if trouble < 0.006:
            generation.hand_out()
            raise EngineError("the script fails")
        if trouble < 0.015:  # the tokens since the last part are lost with the connection
            raise EngineLost(f"{self.name} has reset the connection")
        new = generation.hand_out()
        generation.tell_versions()
        if new:  # as the client of an engine does: it may be the end token
            generation.record.completion.cut(len(generation.record.tokens) - 1)
        raise Aborted("the script aborts it", attested=True)


class _Generation:
    """The work of one engine on one completion."""

    def __init__(
        self,
        engine: ScriptedEngine,
        fleet: Fleet,
        record: Record,
        sampling: LiveSampling,
        version: int,
        draw: random.Random,
    ) -> None:
        self.record = record
        self._fleet = fleet
        self._sampling = sampling
        self._reported = version
        self._draw = draw
        self._begin = self._handed_out = len(record.tokens)
        self._budget = record.completion.tokens_left(sampling.max_new_tokens)
        parameters = sampling.parameters
        stop = parameters.get("stop") or []
        self._stops = [stop] if isinstance(stop, str) else [str(text) for text in stop]  # type: ignore[union-attr]
        policy = fleet.policy
        self._ends = {policy.end, policy.other_end, *(parameters.get("stop_token_ids") or ())}  # type: ignore[misc]
        if parameters.get("ignore_eos"):
            self._ends = set()
        if not record.plan or (record.losses and draw.random() < 0.3):
            # Another engine samples something else behind what is there.
            record.plan = [*record.tokens, *policy.answer(random.Random(draw.random()), record.prompt)]
        self._matched: int | str | None = None

    @property
    def is_over(self) -> bool:
        return self.record.finish is not None

    def sample(self, most: int) -> None:
        """Sample up to so many tokens, from the weights of this moment."""
        for _ in range(most):
            self.record.finish = self._sample_one()
            if self.is_over:
                return

    def _sample_one(self) -> Finish | None:
        """Sample a token, and return whether the completion has ended with it."""
        record, place = self.record, len(self.record.tokens)
        if place - self._begin >= self._budget:
            return Finish.LENGTH
        while place >= len(record.plan):
            record.plan += self._fleet.policy.answer(self._draw, record.prompt)
        token = record.plan[place]
        record.tokens.append(token)
        record.logprobs.append(float(np.float32(-self._draw.expovariate(1.0))))
        record.said.append(self._reported)
        record.sampled_by.append(self._fleet.version)
        if token in self._ends:
            self._matched = token
            return Finish.STOP
        self._matched = self._match() if self._stops else None
        if self._matched is not None:
            return Finish.STOP
        return Finish.LENGTH if place + 1 - self._begin >= self._budget else None

    def _match(self) -> str | None:
        """Look for stop strings where SGLang does: in what this request has sampled."""
        text = self._fleet.policy.tokenizer.decode(self.record.tokens[self._begin :])
        return next((stop for stop in self._stops if stop in text), None)

    def hand_out(self) -> int:
        """Send the tokens since the last time, and return how many. Their version is a lower bound."""
        record, new = self.record, slice(self._handed_out, None)
        tokens = record.tokens[new]
        record.completion.add(self._reported, tokens, record.logprobs[new])
        if self._sampling.top_logprobs:
            record.completion.alternatives += [
                tuple(
                    (record.logprobs[i] - rank, record.tokens[i])
                    for rank in range(self._sampling.top_logprobs)
                )
                for i in range(self._handed_out, len(record.tokens))
            ]
        self._handed_out = len(record.tokens)
        self._reported = self._fleet.version
        return len(tokens)

    def tell_versions(self) -> None:
        """Send the exact versions of all tokens of this request."""
        record = self.record
        record.said[self._begin :] = record.sampled_by[self._begin :]
        record.completion.retag(self._begin, [(version, 1) for version in record.said[self._begin :]])

    def end(self) -> None:
        """Send the rest, and why it has ended."""
        self.hand_out()
        self.tell_versions()
        completion = self.record.completion
        assert self.record.finish is not None
        completion.finish, completion.matched = self.record.finish, self._matched


class Roster(Protocol):
    """The part of ``EngineRoster`` that updates need."""

    @property
    def clients(self) -> Sequence[Any]: ...
    async def doubt(self, version: int) -> None: ...
    def trust(self, client: Any) -> None: ...
    def condemn(self, client: Any, reason: str) -> None: ...
    def drained(self, timeout_s: float) -> AbstractAsyncContextManager[None]: ...


class ScriptedEngines:
    """Updates and losses of scripted engines: ``driver.Engines``."""

    def __init__(self, fleet: Fleet, seed: int, count: int = 2) -> None:
        self._fleet = fleet
        self._draw = random.Random(f"engines {seed}")
        self._serving = [fleet.start() for _ in range(count)]
        self._verdicts: set[asyncio.Task[None]] = set()

    def serving(self) -> list[ScriptedEngine]:
        return self._serving

    async def update(self, version: int, roster: Roster, published: Callable[[], None]) -> None:
        """Move all engines to a version: in the middle of answers, between them, or with a verdict later."""
        way = self._draw.choice(["in place", "held", "doubted"])
        if way == "held":
            async with roster.drained(0.02):
                self._fleet.version = version
                published()
            return
        if way == "doubted":
            await roster.doubt(version)
        self._fleet.version = version
        published()
        if way == "doubted":
            verdict = asyncio.create_task(self._verdict(roster, self._draw.random() < 0.2))
            self._verdicts.add(verdict)
            verdict.add_done_callback(self._verdicts.discard)

    async def _verdict(self, roster: Roster, is_wrong: bool) -> None:
        await asyncio.sleep(0.003)
        for number, client in enumerate(list(roster.clients)):
            if is_wrong and not number:
                roster.condemn(client, "its weights are wrong")
            else:
                roster.trust(client)

    async def replaced(self, lost: ScriptedEngine) -> ScriptedEngine:
        lost.lost.set()
        engine = self._fleet.start()
        self._serving = [engine if each is lost else each for each in self._serving]
        return engine

    def go_back(self, version: int) -> None:
        """End all engines, and start others with an older version."""
        for engine in self._serving:
            engine.lost.set()
        self._fleet.version = version
        self._serving = [self._fleet.start() for _ in self._serving]

    def kill_one(self) -> None:
        """End an engine, of which nobody is told."""
        self._draw.choice(self._serving).lost.set()
