"""The driver of live users without trainer and engines' processes: takes turns, has them judged and trains.

    python -m tests.gateway_memory.driver RUN ENGINE_URL

Receiver, ledger, live turns, judging and control core are those of a run. A training step only takes its
batch and publishes the next version, of which the engine is told. Judges are scripted: some turns are put
off, and some verdicts fail. A line on standard input is answered by one with what the process holds. The
program ends with its standard input.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from slipstream.configs.schema.judge import CodeJudge
from slipstream.configs.schema.live import LiveJudgingConfig, RunningBaseline
from slipstream.rollout.collection.driver.batches import Batches
from slipstream.rollout.collection.driver.gate import AdmissionGate
from slipstream.rollout.collection.driver.intake import Intake
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.versions import VersionTree
from slipstream.rollout.engine.client import EngineAddress, EngineClient
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.ledger.recovery import open_ledger
from slipstream.rollout.live.baseline import ScoreBaseline
from slipstream.rollout.live.driver_address import DriverAddress
from slipstream.rollout.live.judging import LiveJudging
from slipstream.rollout.live.live_turns import LiveTurns
from slipstream.rollout.live.receiver import GatewayReceiver
from slipstream.rollout.prompts import PromptSet, PromptStream
from slipstream.rollout.reward.judge.judge_errors import JudgingFailed
from slipstream.rollout.reward.live import JudgedTurn, Verdict
from slipstream.rollout.system.garbage import keep_few_heaps, look_seldom_for_garbage
from slipstream.rollout.system.key import new_key
from slipstream.rollout.tokens.trajectory import Messages, Prompt

TRAJECTORIES = 8
"""Live trajectories of a batch."""
BOUND = 4
STEP_S = 0.05
"""Shortest time between two versions."""
KEPT = 4
"""Versions that a restart could go back to."""
CONTEXT = 4096


class SilentListener:
    """Hears what goes wrong, which is what this program does on purpose."""

    def lost(self, *_: object) -> None: ...
    def attempt_failed(self, *_: object) -> None: ...
    def note(self, text: str) -> None: ...


class ScriptedJudges:
    """Judges by the number of the question: most get a score, some none at first, some an error at first."""

    def __init__(self) -> None:
        self._asked = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator["ScriptedJudges"]:
        yield self

    async def judge(self, turn: JudgedTurn, next_state: Messages) -> Verdict:
        self._asked += 1
        if self._asked % 7 == 0:
            return Verdict(None)
        if self._asked % 11 == 0:
            raise JudgingFailed("the judge is told to fail")
        return Verdict(float(len(next_state) % 2), hint="a hint" if self._asked % 5 == 0 else None)


class Driver:
    """The driver's part of a run, on one event loop."""

    def __init__(self, run: Path, vocab: int, publish: Callable[[int], Awaitable[None]]) -> None:
        """``publish``: brings engines to a version."""
        self.ledger, recovered = open_ledger(run, batch_size=0, n_samples=1, bound=BOUND)
        self.core = RolloutControl(
            0,
            BOUND,
            versions=VersionTree(recovered.versions),
            version=recovered.restored,
            live_trajectories=TRAJECTORIES,
        )
        self.live = LiveTurns(
            self.core,
            self.ledger,
            partial(ScoreBaseline, RunningBaseline()),
            recovered.live,
            train=True,
            vocab=vocab,
        )
        prompts = PromptStream(PromptSet.of([Prompt(0, "")]), shuffle=False, seed=0)
        listener = SilentListener()
        gate = AdmissionGate(self.core, Intake(prompts), self.ledger, listener, live=self.live)
        self.batches = Batches(gate, self.ledger, listener.note, live=self.live, live_wait_s=0.2)
        self.roster = EngineRoster(lambda: self.core.version, limit=64)
        self.key = new_key()
        self.receiver = GatewayReceiver(self.key, self.live, self.roster, limit=64)
        judge = CodeJudge(ask_again_s=0.05)
        settings = LiveJudgingConfig(concurrency=8)
        judges = ScriptedJudges().open
        self.judging = LiveJudging(judge, settings, self.live.verdicts, judges, SilentListener().note)
        self._run = run
        self._publish = publish
        self.steps = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take, judge and train turns inside the block."""
        async with AsyncExitStack() as stack:
            url = await stack.enter_async_context(self.receiver.serving("127.0.0.1"))
            DriverAddress(url, self.key).write(self._run)
            tasks = [
                asyncio.create_task(self.receiver.failed()),
                asyncio.create_task(self.judging.run()),
                asyncio.create_task(self._train()),
            ]
            failing = asyncio.create_task(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
            failing.add_done_callback(partial(_raise_error, tasks))
            try:
                yield
            finally:
                for task in (failing, *tasks):
                    task.cancel()
                await asyncio.gather(failing, *tasks, return_exceptions=True)
        await self.ledger.flushed()

    def close(self) -> None:
        self.ledger.close()

    async def _train(self) -> None:
        while True:
            await self.batches.next(1e9)
            await self.batches.step_begins()
            for each in self.batches.live:
                self.ledger.read(each.refs)
            version = self.batches.next_version
            await self._publish(version)
            self.batches.published(version)
            self.roster.announce()
            if version > KEPT:
                self.ledger.release(version - KEPT)
            self.steps += 1
            await asyncio.sleep(STEP_S)

    def held(self) -> dict[str, int]:
        """Return how many things of each kind are held for turns and sessions."""
        live, door = self.live, self.core.live
        return {
            "turns": len(live._table.turns),
            "sessions": len(live._table.sessions),
            "unjudged": len(live.verdicts._queue),
            "turns of the door": len(door._turns),
            "ready": len(door._ready),
            "standings": len(door._by_standing),
            "withheld": len(door._withheld),
            "expired": len(door._expired),
            "timers": len(self.judging._timers),
            "sessions of the ledger": len(self.ledger._store._holds.segments),
        }


def _raise_error(tasks: list[asyncio.Task[Any]], _: object) -> None:
    """End the process if a task has failed: nobody waits for it."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def _main(run: Path, engine_url: str, vocab: int) -> None:
    async with aiohttp.ClientSession(engine_url) as engine:

        async def publish(version: int) -> None:
            async with engine.post("/version", json={"version": version}) as reply:
                reply.raise_for_status()

        driver = Driver(run, vocab, publish)
        client = EngineClient(EngineAddress("engine-0", engine_url, 1, vocab, CONTEXT, timeout_s=60))
        try:
            async with driver.running():
                driver.roster.add(client)
                loop = asyncio.get_running_loop()
                reader = asyncio.StreamReader()
                await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
                look_seldom_for_garbage()
                print("listening", flush=True)
                while await reader.readline():
                    status = {"held": driver.held(), "steps": driver.steps, "ends": driver.core.live.ends}
                    print(json.dumps(status), flush=True)
        finally:
            await client.close()
            driver.close()


if __name__ == "__main__":
    import uvloop

    keep_few_heaps()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
