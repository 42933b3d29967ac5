"""What a gateway and the driver hold after turns that are over, and that have been trained: nothing of them.

All parts are those of a run but for the endpoints, the engines and the trainer.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from slipstream.rollout.engine.connection import EngineAddress
from slipstream.rollout.engine.engine_pool import EnginePool
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.gateway.conversations import Arrival, ClientReward, UnknownTurn, User
from slipstream.rollout.gateway.engines import EngineTokens
from slipstream.rollout.gateway.journal import TIDY_S, TurnJournal
from slipstream.rollout.gateway.link import DriverLink
from slipstream.rollout.gateway.serving.running import RunningAnswer, RunningTurns
from slipstream.rollout.gateway.serving.text import GrowingText
from slipstream.rollout.gateway.sessions.placing import SessionLimits
from slipstream.rollout.gateway.sessions.sessions import Sessions
from slipstream.rollout.gateway.source import TokenRequest
from slipstream.rollout.live import table
from slipstream.rollout.live.driver_address import DriverAddress
from slipstream.rollout.tokens.trajectory import Finish
from slipstream.rollout.tokens.turn_entries import TurnType
from tests.gateway_memory.driver import Driver
from tests.gateway_memory.held import held
from tests.unit.talking import ChatTemplate, decode, encode

USER = User("users")
VOCAB = 512
TURNS = 1000
"""Turns between two looks."""
IDLE_S = 20.0
TICK_S = 0.05
"""Time that passes whenever the clock is read."""
TIMEOUT_S = 120.0


class Engine:
    """The client of an engine that answers at once, or when the test lets it."""

    def __init__(self) -> None:
        self._dice = random.Random(2)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: object,
        completion: GrowingCompletion,
        *,
        greedy: bool = False,
        cache_key: str | None = None,
        version: int,
        grown: Callable[[], None] | None = None,
    ) -> None:
        for _ in range(self._dice.randint(1, 4)):
            tokens = self._dice.choices(range(97, 123), k=4)
            completion.add(version, tokens, [-1.0] * len(tokens))
            if grown is not None:
                grown()
            await asyncio.sleep(0)
        completion.finish = Finish.STOP

    async def close(self) -> None: ...


class Client:
    """Stands for an engine in the roster of the driver."""

    name = "engine-0"
    address = EngineAddress("engine-0", "http://127.0.0.1:9", 1, VOCAB, 4096, timeout_s=60)


class Gateway:
    """A gateway's process without its endpoints."""

    def __init__(self, folder: Path) -> None:
        self.journal = TurnJournal.open(folder / "gateway" / "gateway-0.sqlite", "gateway-0")
        self.pool = EnginePool(
            wait_timeout_s=60,
            isolate_versions=False,
            connect=lambda _: Engine(),
            report=lambda: link.report(),
        )
        self.link = link = DriverLink(self.journal, self.pool, lambda: DriverAddress.read(folder))
        names = iter(range(1 << 30))
        self.sessions = Sessions(
            SessionLimits(200, 60_000, IDLE_S),
            temperature=1.0,
            override=False,
            decode=decode,
            mint=lambda: f"minted {next(names)}",
        )
        self.turns = RunningTurns(
            EngineTokens(self.pool, decode), self.sessions, self.journal, clock=self.time
        )
        self.now = 1000.0
        self.template = ChatTemplate()
        self.dice = random.Random(3)
        self.count = 0

    def time(self) -> float:
        self.now += TICK_S
        return self.now

    async def user(self, number: int) -> None:
        """Have a conversation of a few turns, in one of many ways."""
        dice, messages, name = self.dice, [], f"session {number}" if number % 3 else None
        length = dice.randint(1, 4)
        for turn in range(length):
            messages.append({"role": "user", "content": f"question {number} {turn}"})
            leaves = dice.random() < 0.1
            answer = await self.ask(
                messages,
                session=name,
                turn_type=TurnType.SIDE if dice.random() < 0.1 else None,
                ends_session=turn == length - 1 and number % 4 != 0,
                choices=1 + (dice.random() < 0.1),
                leaves=leaves,
            )
            messages.append({"role": "assistant", "content": answer})
            if dice.random() < 0.1:
                messages[0] = {"role": "user", "content": f"rewritten {number} {turn}"}
            if dice.random() < 0.2 and name is not None:
                with suppress(UnknownTurn):
                    self.journal.append(
                        self.sessions.reward(USER, ClientReward(value=0.5, session=name)).entries
                    )
        if number % 50 == 0:
            self.journal.append(self.sessions.forget(f"session {number - 1}", USER.name))
        self.journal.append(self.sessions.sweep(self.now))

    async def ask(self, messages, *, choices: int, leaves: bool, **more) -> str:
        """Ask, read and record as the endpoints do; who ``leaves`` is gone before the end."""
        text = self.template.render(messages, answer=True)
        begun = self.sessions.begin(
            Arrival(
                user=USER,
                digest=b"",
                retries=0,
                messages=list(messages),
                prompt_ids=encode(text),
                text=text,
                template=self.template,
                most_tokens=1 << 20,
                sampling={"temperature": 1.0},
                choices=choices,
                arrived_s=self.time(),
                **more,
            )
        )
        requests = [TokenRequest(begun.input_ids, {"max_new_tokens": 32, "temperature": 1.0})] * choices
        answers = self.turns.start(
            begun, requests, lambda choice: RunningAnswer(begun, choice, GrowingText(decode))
        )
        try:
            await answers[0].started()
            if leaves:
                return ""
            for answer in answers:
                await answer.ended()
                await self.turns.record(answer, {"role": "assistant", "content": answer.text})
            return answers[0].text
        finally:
            self.turns.leave(answers)
            self.count += choices

    async def talk(self, turns: int) -> None:
        """Have so many further turns, a few users at a time."""
        enough = self.count + turns
        numbers = iter(range(self.count, 1 << 30))

        async def users() -> None:
            while self.count < enough:
                await self.user(next(numbers))

        await asyncio.gather(*(users() for _ in range(8)))

    async def rest(self) -> None:
        """End all sessions by their time-out, and wait until nothing of them is left in the journal."""
        self.now += 2 * IDLE_S
        self.journal.append(self.sessions.sweep(self.now))
        await self.journal.handed_over()
        while await self.journal.read(0):
            await asyncio.sleep(TIDY_S / 10)


def test_turns_that_are_over_leave_nothing_behind(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(table, "PAST_KEPT", 500)  # there are more turns before the first look
    looks: list[Counter[str]] = []

    async def publish(version: int) -> None: ...

    async def main() -> None:
        driver = Driver(tmp_path, VOCAB, publish)
        gateway = Gateway(tmp_path)
        try:
            async with asyncio.timeout(TIMEOUT_S), driver.running():
                driver.roster.add(Client())  # pyright: ignore[reportArgumentType]
                linking = asyncio.create_task(gateway.link.run())
                await gateway.link.connected.wait()
                while not gateway.pool.capacity:
                    await asyncio.sleep(0.01)
                for _ in range(2):
                    await gateway.talk(TURNS)
                    await gateway.rest()
                    while any(driver.held().values()):
                        driver.ledger.release(driver.core.version)
                        await asyncio.sleep(0.05)
                    looks.append(held())
                linking.cancel()
                await asyncio.wait({linking})
        finally:
            await gateway.pool.close()
            gateway.journal.close()
            driver.close()
        assert gateway.sessions.sessions == gateway.sessions.size == 0
        assert set(driver.core.live.ends) == {
            "trained",
            "side",
            "cancelled",
            "expired",
            "forgotten",
            "unpaired",
        }

    asyncio.run(main())
    before, after = looks
    grown = {name: (before[name], count) for name, count in after.items() if count > before[name] + 100}
    # Of the turns that expire behind the last batch, which one is, chance decides; there is a limit to them.
    assert {name: counts for name, counts in grown.items() if ".SinceLastBatch." not in name} == {}
