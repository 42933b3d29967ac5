"""A driver inside this process: receiver, ledger, turns, control core and gate, without a trainer.

What the trainer would get is handed to the oracle. Then the version is published: the engines hold it from
the moment at which the pools doubt it, in the middle of answers.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.driver.loops.training import encoded
from slipstream.configs.schema.live import RunningBaseline
from slipstream.rollout.collection.driver.batches import Batches
from slipstream.rollout.collection.driver.gate import AdmissionGate
from slipstream.rollout.collection.driver.intake import Intake
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.versions import VersionTree
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.ledger.recovery import open_ledger
from slipstream.rollout.live.baseline import ScoreBaseline
from slipstream.rollout.live.driver_address import DriverAddress
from slipstream.rollout.live.live_turns import LiveTurns
from slipstream.rollout.live.receiver import GatewayReceiver
from slipstream.rollout.prompts import PromptSet, PromptStream
from slipstream.rollout.reward.live import JudgedTurn, Verdict
from slipstream.rollout.system.key import new_key
from slipstream.rollout.tokens.trajectory import Messages, Prompt
from tests.unit.doubles import Listener

BOUND = 30
TRAJECTORIES = 8

Judge = Callable[[JudgedTurn, Messages], float | None]


class Engines(Protocol):
    """The engines of a run, as their driver knows them."""

    async def update(self, version: int, roster: EngineRoster, published: Callable[[], None]) -> None:
        """Bring all engines to a version, and call ``published`` when the roster may announce it."""
        ...

    def serving(self) -> list[Any]:
        """Return the engines that are to serve."""
        ...

    async def replaced(self, lost: Any) -> Any:
        """Return an engine in the place of one that was lost."""
        ...


@dataclass
class _Said(Listener):
    notes: list[str] = field(default_factory=list[str])

    def note(self, text: str) -> None:
        self.notes.append(text)


class Driver:
    """One life of a driver."""

    def __init__(
        self,
        folder: Path,
        *,
        vocab: int,
        engines: Engines,
        judge: Judge,
        trained: Callable[[int, int, TrainBatch, Mapping[int, int]], None],
        restored: int = 0,
        seed: int = 0,
    ) -> None:
        """``trained``: is called with a version, its parent, the batch, and the lags of versions in it."""
        folder.mkdir(exist_ok=True)
        self.ledger, self.recovered = open_ledger(
            folder, batch_size=0, n_samples=1, bound=BOUND, restored=restored
        )
        self.core = RolloutControl(
            0,
            BOUND,
            versions=VersionTree(self.recovered.versions),
            version=restored,
            live_trajectories=TRAJECTORIES,
        )
        self.live = LiveTurns(
            self.core,
            self.ledger,
            partial(ScoreBaseline, RunningBaseline()),
            self.recovered.live,
            train=True,
            vocab=vocab,
        )
        said = _Said()
        self.gate = AdmissionGate(
            self.core,
            Intake(PromptStream(PromptSet.of([Prompt(0, "")]), shuffle=False, seed=0)),
            self.ledger,
            said,
            live=self.live,
        )
        self.batches = Batches(self.gate, self.ledger, said.note, self.recovered.failures, self.live)
        self.address: DriverAddress | None = None
        self.is_ending = False
        """Everything that is ready is trained at once."""
        self._engines = engines
        self._judge = judge
        self._trained = trained
        self._draw = random.Random(f"driver {seed} {restored}")
        self._tasks: list[asyncio.Task[None]] = []
        self._judged = asyncio.Event()
        self.updating = asyncio.Lock()
        """Held while a step goes on."""

    async def start(self) -> None:
        """Listen, judge and train."""
        self.roster = EngineRoster(lambda: self.gate.core.version, limit=256, epoch=self.ledger.epoch)
        for engine in self._engines.serving():
            self.roster.add(engine)
        key = new_key()
        self._receiver = GatewayReceiver(key, self.live, self.roster, limit=256)
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def listen() -> None:
            async with self._receiver.serving("127.0.0.1") as url:
                listening.set_result(url)
                await self._receiver.failed()

        works: list[Callable[[], Awaitable[None]]] = [listen, self._judge_all, self._train, self._replace]
        self._tasks = [asyncio.create_task(self._run(work), name=work.__name__) for work in works]
        self.address = DriverAddress(await listening, key)

    @staticmethod
    async def _run(work: Callable[[], Awaitable[None]]) -> None:
        await work()

    def check(self) -> None:
        """Raise what has ended one of the tasks."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def stop(self) -> None:
        """End between two steps. What is not in the ledger is lost with it."""
        self.address = None
        async with self.updating:
            for task in self._tasks:
                task.cancel()
            results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.ledger.close)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def settled(self) -> None:
        """Wait until all turns have come to their ends."""
        self.is_ending = True
        while True:
            self.check()
            status = self.live.status()
            if not (status.waiting or status.unjudged or status.ready or self.core.live.training):
                await self.ledger.flushed()
                return
            await asyncio.sleep(0.005)

    # ---- its work

    async def _judge_all(self) -> None:
        while True:
            id_ = await self.live.verdicts.unjudged()
            question = self.live.verdicts.question(id_)
            if question is None:
                continue
            score = self._judge(*question)
            if score is None:
                asyncio.get_running_loop().call_later(
                    self._draw.choice([0.005, 0.1, 0.5]), self.live.verdicts.ask_again, id_
                )
            else:
                self.live.verdicts.take(id_, Verdict(score))

    async def _train(self) -> None:
        while True:
            await self._enough()
            async with self.updating:
                await self._step()

    async def _enough(self) -> None:
        """Wait for as many trajectories as the next step is to have."""
        ready = asyncio.Event()
        self.live.when_ready(ready.set)
        least = self._draw.choice([1, 4, 8])
        while self.core.live.available < (1 if self.is_ending else least):
            ready.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await ready.wait()

    async def _step(self) -> None:
        groups = await self.batches.next(60.0)
        await self.batches.step_begins()

        async def read(refs: list[bytes]) -> list[bytes]:
            return [self.ledger.read(each) for each in refs]

        coded = await encoded(groups, self.batches, read)
        parent, version = self.gate.core.version, self.batches.next_version
        self._trained(version, parent, coded.decoded(), coded.lags)
        await self._engines.update(version, self.roster, lambda: self._published(version))
        await self.ledger.flushed()

    def _published(self, version: int) -> None:
        self.batches.published(version)
        self.roster.announce()

    async def _replace(self) -> None:
        """Put another engine in the place of each that was lost."""
        while True:
            lost, _ = await self.roster.lost.get()
            engine = await self._engines.replaced(lost)
            async with self.updating:
                self.roster.add(engine)
