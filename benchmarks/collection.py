"""A run without trainer and engines, for benchmarks of collection: its driver, and its collectors."""

import asyncio
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.sleeping_engine import LONGEST, VOCABULARY, CollectorTask, EngineTask, Report
from slipstream.backend.driver.loops.collection import collection_loop
from slipstream.backend.driver.loops.training import encoded
from slipstream.rollout.collection.driver.assignments import Assignments
from slipstream.rollout.collection.driver.batches import Batches
from slipstream.rollout.collection.driver.gate import AdmissionGate
from slipstream.rollout.collection.driver.intake import Intake
from slipstream.rollout.collection.driver.questions import EvaluationTasks
from slipstream.rollout.collection.driver.server import CollectorServer
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.engine.client import EngineAddress, EngineClient
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.ledger.recovery import open_ledger
from slipstream.rollout.ledger.writing.writer import Ledger
from slipstream.rollout.prompts import PromptSet, PromptStream
from slipstream.rollout.system.garbage import OF_RECORDED_EPISODE, look_seldom_for_garbage
from slipstream.rollout.system.key import new_key
from slipstream.rollout.tokens.trajectory import Prompt, TrajectoryHeader

BATCH = 256
"""Trajectories."""
ENGINES = 8
STEPS_KEPT = 20
"""Steps since the oldest checkpoint that is kept."""
TIMEOUT_S = 120.0
END_TIMEOUT_S = 20.0
LONGEST_REPORT = 1 << 30
"""Bytes."""
SHORT = EngineTask(tokens=512, seconds=0.1)


@dataclass(frozen=True)
class Load:
    """The episodes that are collected, and the number of processes that do it."""

    concurrent: int
    """Requests that the engines run at one time."""
    collectors: int = 1
    samples: int = 1
    """Trajectories of a group."""
    engine: EngineTask = SHORT
    slots: int | None = None
    """Trajectories that may exist at one time; None: four times as many as the engines may run."""
    batch: int = BATCH
    """Trajectories."""
    judged: bool = False
    """Judge processes give the rewards."""
    clock_rate: float = 1.0
    """Seconds of the records' clock per second."""
    turns: int = 1
    """Completions of an episode."""

    @property
    def groups(self) -> int:
        """Groups of a batch."""
        return self.batch // self.samples

    @property
    def bound(self) -> int:
        """Bound that gives the load its slots."""
        return max(0, (self.slots or 4 * self.concurrent) // self.batch - 1)


# ---- what processes use


@dataclass(frozen=True)
class Usage:
    """The resources that a process has used since its start."""

    cpu_s: float
    written: int
    """Bytes given to files, in whole pages."""


def usage_of(process: int) -> Usage:
    """Return what a process has used, to a hundredth of a second."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), written_by(process))


def written_by(process: int) -> int:
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("write_bytes")]
    return int(line.split()[1])


def own_usage() -> Usage:
    """Return what this process has used, all threads together."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(usage.ru_utime + usage.ru_stime, written_by(os.getpid()))


# ---- collectors


class CollectorProcess:
    """The process of a collector, and what it reports at its end."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, task: CollectorTask) -> "CollectorProcess":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.sleeping_engine",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            limit=LONGEST_REPORT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
        return cls(process)

    async def connected(self) -> None:
        """Wait until the collector knows the engines."""
        assert self._process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            if not await self._process.stdout.readline():
                raise RuntimeError("a collector has ended before it was connected")

    def stand_still(self, seconds: float) -> None:
        """Have the event loop of the process stand still."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n".encode())

    async def report(self) -> Report:
        """End the process, and return its report."""
        async with asyncio.timeout(END_TIMEOUT_S):
            output, _ = await self._process.communicate(b"")  # closes its standard input, which ends it
        return Report(**json.loads(output))

    async def killed(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        await self._process.wait()

    def kill(self) -> None:
        """Kill the process if it runs."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def usage(self) -> Usage:
        return usage_of(self._process.pid)


# ---- the driver


class Silent:
    """Hears of lost work, of which there must be none."""

    def lost(self, loss: Loss, trajectories: Sequence[TrajectoryHeader], reason: str = "") -> None:
        raise RuntimeError(f"a group is lost: {loss} {reason}")

    def attempt_failed(self, prompt: int, attempt: int, error: str) -> None:
        raise RuntimeError(f"prompt {prompt}, attempt {attempt}: {error}")

    def note(self, text: str) -> None:
        raise RuntimeError(text)


class Run:
    """The driver of a run without trainer and engines."""

    def __init__(self, load: Load, ledger: Ledger, folder: Path) -> None:
        self.load = load
        self.ledger = ledger
        self.folder = folder
        self.url = ""
        """Where collectors connect, once they may."""
        control = RolloutControl(load.groups, load.bound)
        text = "What is the sum of the first hundred odd numbers? " * 5
        prompts = [Prompt(number, text, "10000", {"level": 1}) for number in range(1000)]
        intake = Intake(PromptStream(PromptSet.of(prompts), shuffle=True, seed=0))
        listener = Silent()
        self.gate = AdmissionGate(control, intake, ledger, listener)
        self.batches = Batches(self.gate, ledger, listener.note)
        self.roster = EngineRoster(lambda: control.version, limit=load.concurrent)
        self.assignments = Assignments(
            self.gate, ledger, listener, share_of=self.roster.share_of, samples=load.samples
        )
        self.key = new_key()
        self.server = CollectorServer(self.key, self.assignments, EvaluationTasks(), self.roster, ledger)
        self.collectors: list[CollectorProcess] = []
        self._numbers = itertools.count()
        self.reports: list[Report] = []
        """The reports of all collectors, after the end of the run."""
        self.freed: list[float] = []
        """Times at which slots became free, once for each, in seconds of ``time.monotonic``."""

    async def start_collector(self) -> CollectorProcess:
        """Start another collector, and return before it is connected."""
        load, number = self.load, next(self._numbers)
        task = CollectorTask(
            f"collector-{number}",
            self.url,
            str(self.key),
            str(self.folder),
            load.samples,
            load.engine,
            load.judged,
            load.clock_rate,
            load.turns,
        )
        collector = await CollectorProcess.start(task)
        self.collectors.append(collector)
        return collector

    async def step(self) -> None:
        """Take a batch as far as the trainer gets it, and publish a version."""
        batches = self.batches
        groups = await batches.next(TIMEOUT_S)
        await batches.step_begins()
        await encoded(groups, batches, self.read)
        batches.published(batches.next_version)
        self.roster.announce()
        self.freed += [time.monotonic()] * len(groups)
        if batches.core.version > STEPS_KEPT:
            self.ledger.release(batches.core.version - STEPS_KEPT)

    async def read(self, refs: list[bytes]) -> list[bytes]:
        return await asyncio.to_thread(lambda: [self.ledger.read(each) for each in refs])

    async def warm_up(self) -> None:
        """Train until every place on the engines has been used, and a little longer."""
        for _ in range(4 + self.load.concurrent // self.load.batch):
            await self.step()


@asynccontextmanager
async def running(load: Load, folder: Path) -> AsyncIterator[Run]:
    """Collect inside the block, which begins when all collectors are connected."""
    ledger, _ = open_ledger(folder, batch_size=load.groups, n_samples=load.samples, bound=load.bound)
    clients = [EngineClient(address(number)) for number in range(ENGINES)]
    run = Run(load, ledger, folder)
    try:
        async with run.server.serving("127.0.0.1") as run.url, asyncio.TaskGroup() as tasks:
            for client in clients:
                run.roster.add(client)
            failing = tasks.create_task(run.server.failed())
            try:
                for _ in range(load.collectors):
                    await run.start_collector()
                for collector in run.collectors:
                    await collector.connected()
                look_seldom_for_garbage(OF_RECORDED_EPISODE * (load.bound + 1) * load.batch)
                collecting = tasks.create_task(collection_loop(run.gate, run.assignments))
                yield run
                collecting.cancel()
                await run.assignments.close()
                run.reports = [await collector.report() for collector in run.collectors]
            finally:
                for collector in run.collectors:
                    collector.kill()
            failing.cancel()
    finally:
        for client in clients:
            await client.close()
        ledger.close()


def address(number: int) -> EngineAddress:
    """Return the address of an engine that has no server."""
    return EngineAddress(
        name=f"engine-{number}",
        url="http://127.0.0.1:9",
        ranks=1,
        vocab_size=VOCABULARY,
        max_length=2 * LONGEST,
        timeout_s=60,
    )
