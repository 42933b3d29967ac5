"""One dialect's conversations, from the first request to the audit."""

import asyncio
import random
import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.rollout.engine.connection import EngineAddress
from slipstream.rollout.engine.engine_pool import GeneratingClient
from slipstream.rollout.ledger.audit.account import audit_ledger
from slipstream.rollout.reward.live import JudgedTurn
from slipstream.rollout.tokens.trajectory import Messages
from tests.exactness.client import World
from tests.exactness.conversations import Conversation
from tests.exactness.dialects import CONTEXT, Dialect
from tests.exactness.driver import Driver, Engines
from tests.exactness.engines import Fleet, Records, ScriptedEngines
from tests.exactness.gateway import Gateway, recipe
from tests.exactness.oracle import Oracle
from tests.exactness.policy import Policy
from tests.exactness.rewriting import RewritingAgent, check_pairs

TEMPERATURE = 0.9
SETTLE_S = 120.0


@dataclass
class Scene:
    """The engines of a run, and what surrounds them."""

    dialect: Dialect
    model: Path
    tokenizer: Any
    records: Records
    engines: Engines
    connect: Callable[[EngineAddress], GeneratingClient]
    """Opens a connection of the gateway with an engine."""
    context: int = CONTEXT
    scripted: ScriptedEngines | None = None
    """The engines, if they are scripted: then they, the gateway and the driver are ended now and then."""
    most_tokens: int | None = None
    """Length of the longest answer; None: an answer ends by itself."""


def scripted_scene(folder: Path, dialect: Dialect, seed: int) -> Scene:
    """Return engines that follow a script."""
    tokenizer = dialect.write(folder / "model")
    fleet = Fleet(Policy(dialect, tokenizer), seed)
    engines = ScriptedEngines(fleet, seed)
    return Scene(
        dialect, folder / "model", tokenizer, fleet.records, engines, fleet.connect, scripted=engines
    )


class Run:
    """A gateway, a driver and engines, and the conversations of one dialect."""

    def __init__(self, folder: Path, scene: Scene, seed: int, *, rewriting: bool = False) -> None:
        """``rewriting``: all clients are agents that rewrite their histories."""
        self.rewriting = rewriting
        dialect = scene.dialect
        self.folder = folder
        self.scene = scene
        self.draw = random.Random(f"run {dialect.name} {seed}")
        self.seed = seed
        self.oracle = Oracle(scene.records)
        overrides = dialect.name == "llama3"
        settings = {
            "tool_parser": dialect.tool_parser,
            "reasoning_parser": dialect.reasoning_parser,
            "sampling": "recipe" if overrides else "client",
        }
        self.gateway = Gateway(
            folder,
            recipe(folder, scene.model, settings, TEMPERATURE),
            context=scene.context,
            connect=scene.connect,
            decode=scene.tokenizer.decode,
            find=lambda: self.driver.address,
        )
        self.world = World(
            self.gateway,
            self.oracle,
            dialect,
            scene.tokenizer,
            TEMPERATURE,
            overrides,
            most_tokens=scene.most_tokens,
        )
        self.restarts = Counter[str]()
        self._is_over = False
        """No trouble begins any more."""

    def _driver(self, restored: int = 0) -> Driver:
        return Driver(
            self.folder / "run",
            vocab=len(self.world.tokenizer),
            engines=self.scene.engines,
            judge=self._judge,
            trained=self.oracle.trained,
            restored=restored,
            seed=self.seed,
        )

    def _judge(self, turn: JudgedTurn, next_state: Messages) -> float | None:
        """Judge at once, later, or when the conversation is over: then several turns are trained together."""
        self.oracle.judged(turn, next_state)
        is_patient = zlib.crc32(turn.session.encode()) % 2
        if is_patient and turn.session in self.world.talking and self.draw.random() < 0.98:
            return None
        return None if self.draw.random() < 0.2 else self.draw.choice([1.0, 0.0, -1.0])

    async def converse(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Hold the conversations with these numbers, and return what was found."""
        self.driver = self._driver()
        await self.driver.start()
        await self.gateway.start()
        client = RewritingAgent if self.rewriting else Conversation
        talking = [asyncio.create_task(client(self.world, n, self.seed).run()) for n in numbers]
        troubling = None
        if self.scene.scripted is not None:
            troubling = asyncio.create_task(self._trouble(self.scene.scripted))
        try:
            for each in asyncio.as_completed(talking):
                await each
                self.driver.check()
        finally:
            # Not cancelled: what is being started again would stay as it is.
            self._is_over = True
            if troubling is not None:
                await troubling
            await asyncio.gather(*talking, return_exceptions=True)
        await self.gateway.end_sessions()
        async with asyncio.timeout(SETTLE_S):
            await self.driver.settled()
        await self.gateway.stop()
        await self.driver.stop()
        return self._report(len(numbers))

    async def _trouble(self, engines: ScriptedEngines) -> None:
        """End engines, the gateway and the driver now and then."""
        draw = self.draw
        while True:
            begun = self.world.asked
            while self.world.asked < begun + draw.randint(15, 40):
                await asyncio.sleep(0.005)
                if self._is_over:
                    return
            trouble = draw.choice(["engine", "engine", "gateway", "driver", "rewind"])
            self.restarts[trouble] += 1
            match trouble:
                case "engine":
                    engines.kill_one()
                case "gateway":
                    await self.gateway.restart()
                case _:
                    await self._restart_driver(engines, rewinds=trouble == "rewind")

    async def _restart_driver(self, engines: ScriptedEngines, *, rewinds: bool) -> None:
        """Start the driver again; if it ``rewinds``, from an older version, as after a loss of weights."""
        await self.driver.stop()
        line = [self.driver.gate.core.version]
        tree = self.driver.core.versions
        while (parent := tree.parent(line[-1])) is not None:
            line.append(parent)
        restored = self.draw.choice(line[:4]) if rewinds else line[0]
        if rewinds:
            engines.go_back(restored)
            self.oracle.rewound(restored)
        self.driver = self._driver(restored)
        await self.driver.start()

    def _report(self, conversations: int) -> dict[str, Any]:
        if not self.rewriting:  # whose messages are not those of their histories
            self.oracle.check_questions()
        audit = audit_ledger(self.folder / "run")[0]
        states: dict[str, int] = Counter()
        with sqlite3.connect(self.folder / "run" / "ledger.sqlite") as ledger:
            states.update(dict(ledger.execute("SELECT state, count(*) FROM turns GROUP BY state")))
        certain, possible = self.oracle.due()
        ended = states["trained"] + states["expired"] + states["unpaired"]
        branches: Counter[str] = Counter()
        side: Counter[str] = Counter()
        for counters in self.gateway.counters:
            branches += counters.branches
            side += counters.side
        pairs = check_pairs(self.oracle) if self.rewriting else {}
        report = {
            "conversations": conversations,
            "turns": len(self.scene.records.all),
            "versions": self.driver.gate.core.version,
            "outcomes": dict(self.oracle.outcomes()),
            "branches": dict(branches),
            "side": dict(side),
            "ends": dict(states),
            "restarts": dict(self.restarts),
            **asdict(self.oracle.findings),
            "lost_turns": max(0, certain - ended) + max(0, ended - possible),
            "discrepancies": audit.discrepancies,
            **pairs,
        }
        return report
