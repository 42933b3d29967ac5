"""Admission -> ready -> trained: trajectories per second, and the wait of a free slot.

    python -m benchmarks.control

Each group is one trajectory of 512 tokens, and a batch has 256 of them, as in AReaL's measurement of its own
class, which keeps everything in memory. Engines and trainer are stand-ins that take no time (or 100 ms per
episode), so that only the control plane is measured: one event loop, with the ledger on this folder's disk.
"""

import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import uvloop

from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.rollout.collect.gate import AdmissionGate
from slipstream.rollout.collect.intake import Assignment, Intake
from slipstream.rollout.collect.journal import Journal, NoJournal
from slipstream.rollout.collect.running import RunningGroups
from slipstream.rollout.control.core import Loss, RolloutControl
from slipstream.rollout.ledger.recovery import open_ledger
from slipstream.rollout.ledger.writer import Ledger
from slipstream.rollout.prompts import PromptStream
from slipstream.rollout.trajectory import UNSAMPLED, Finish, Group, Prompt, Trajectory

T = TypeVar("T")

BATCH = 256
TOKENS = 512
PROMPT_TOKENS = 64
PEER_PER_S = 23_600
"""AReaL's WorkflowExecutor in memory, batch 256, bound 4, 1,024 concurrent, on this kind of machine."""
PEER_EPISODES_PER_S = 2_314
"""AReaL's WorkflowExecutor with episodes of 100 ms."""


def bound_for(in_flight: int) -> int:
    """Return the bound that admits ``in_flight`` groups."""
    return in_flight // BATCH - 1


_rng = np.random.default_rng(0)
_MASK_T = np.arange(PROMPT_TOKENS + TOKENS) >= PROMPT_TOKENS
_TOKENS_T = _rng.integers(0, 150_000, len(_MASK_T))
_LOGPROBS_T = _rng.random(len(_MASK_T), np.float32)


@lru_cache(maxsize=64)
def versions(version: int) -> np.ndarray:
    return np.where(_MASK_T, np.int32(version), np.int32(UNSAMPLED))


def trajectory(version: int) -> Trajectory:
    """Return 512 sampled tokens behind a prompt. Trajectories share arrays, which engines would make."""
    return Trajectory(_TOKENS_T, _MASK_T, _LOGPROBS_T, versions(version), Finish.STOP, reward=1.0)


def core_per_s(total: int = 100_000) -> float:
    """Measure the state machine alone, with groups that are ready at once."""
    core = RolloutControl(BATCH, 4)
    prompt = Prompt(0, "?")
    trajectories = (trajectory(0),)
    began = time.perf_counter()
    while core.counts.trained < total:
        while core.may_admit():
            ticket = core.admit()
            core.generating(ticket.id)
            core.judging(ticket.id)
            core.finished(Group(ticket.id, prompt, ticket.version, trajectories))
        while core.take_batch() is not None:
            core.published(core.version + 1)
    return core.counts.trained / (time.perf_counter() - began)


@dataclass
class Measured:
    """Throughput and costs of the control plane."""

    what: str
    per_s: float
    p99_admission_ms: float
    cpu_us: float
    """CPU time per trajectory, all threads."""
    peer_per_s: int | None = None
    """Trajectories per second of AReaL's executor, in memory."""


TABLE: Columns[Measured] = {
    "what": lambda row: row.what,
    "trajectories/s": lambda row: f"{row.per_s:,.0f}",
    "p99 wait of a free slot": lambda row: f"{row.p99_admission_ms:.2f} ms",
    "CPU per trajectory": lambda row: f"{row.cpu_us:.0f} us",
    "peer, in memory": lambda row: f"{row.peer_per_s:,}" if row.peer_per_s else "",
}


class Silent:
    """Hears of lost work and does nothing."""

    def lost(self, loss: Loss, trajectories: Sequence[Trajectory]) -> None: ...
    def episode_failed(self, prompt: Prompt, attempt: int, error: Exception) -> None: ...


class Run:
    """Collects and trains as the loops of a run do, with nothing to generate or to train."""

    def __init__(self, gate: AdmissionGate, journal: Journal, concurrent: int, episode_s: float) -> None:
        self.gate = gate
        self.journal = journal
        self.limit = asyncio.Semaphore(concurrent)
        self.episode_s = episode_s
        self.free_since = 0.0
        self.waits: list[float] = []

    async def collect(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                await self.limit.acquire()
                asked = time.perf_counter()
                assignment = await self.gate.slot()
                # A slot that became free during the wait has been free since then.
                self.waits.append(time.perf_counter() - max(asked, self.free_since))
                groups.create_task(self.episode(assignment))

    async def episode(self, assignment: Assignment) -> None:
        ticket = assignment.ticket
        self.gate.generating(ticket)
        if self.episode_s:
            await asyncio.sleep(self.episode_s)
        sampled = trajectory(ticket.version)
        self.limit.release()
        self.journal.trajectory(ticket.id, 0, sampled)
        await self.gate.finished(Group(ticket.id, assignment.prompt, ticket.version, (sampled,)))

    async def train(self, steps: int) -> None:
        for _ in range(steps):
            await self.gate.batch(60)
            await self.gate.step_begins()
            self.gate.published(self.gate.version + 1)
            self.free_since = time.perf_counter()

    def during(self, script: Callable[[], Awaitable[T]]) -> T:
        """Run ``script`` while groups are collected, on the event loop of ``slipstream train``."""

        async def main() -> T:
            collecting = asyncio.create_task(self.collect())
            result = await script()
            collecting.cancel()
            await asyncio.wait({collecting})
            return result

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())


@contextmanager
def opened_ledger(bound: int) -> Iterator[Ledger]:
    """A new ledger on the disk of this folder."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        ledger, _ = open_ledger(Path(folder) / "ledger.sqlite", batch_size=BATCH, n_samples=1, bound=bound)
        try:
            yield ledger
        finally:
            ledger.close()


def make_run(journal: Journal, bound: int, concurrent: int, episode_s: float = 0.0) -> Run:
    intake = Intake(PromptStream([Prompt(i, "?") for i in range(1000)], shuffle=True, seed=0))
    gate = AdmissionGate(RolloutControl(BATCH, bound), intake, journal, Silent(), RunningGroups())
    return Run(gate, journal, concurrent, episode_s)


def measure(what: str, run: Run, steps: int, peer_per_s: int | None = None) -> Measured:
    """Train ``steps`` batches."""

    async def script() -> Measured:
        await run.train(2)  # warm
        run.waits.clear()
        cpu, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        await run.train(steps)
        await run.journal.flushed()
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
        trained = steps * BATCH
        p99_s = float(np.quantile(run.waits, 0.99))
        return Measured(what, trained / seconds, p99_s * 1e3, cpu_s / trained * 1e6, peer_per_s)

    return run.during(script)


def durable(
    what: str,
    in_flight: int,
    steps: int,
    *,
    concurrent: int | None = None,
    episode_s: float = 0.0,
    peer_per_s: int | None = None,
) -> Measured:
    """Train ``steps`` batches with a ledger, and at most ``in_flight`` admitted groups at a time."""
    bound = bound_for(in_flight)
    with opened_ledger(bound) as ledger:
        return measure(what, make_run(ledger, bound, concurrent or in_flight, episode_s), steps, peer_per_s)


def flatness(total: int = 100_000) -> dict[int, float]:
    """Return microseconds per trajectory by the number of trajectories in the ledger, while it grows."""
    with opened_ledger(bound=3) as ledger:
        run = make_run(ledger, 3, 1024)

        async def script() -> dict[int, float]:
            points: dict[int, float] = {}
            steps = 0
            for target in (1_000, 11_000, 45_000, 55_000, 90_000, total):
                before, began = steps, time.perf_counter()
                while steps * BATCH < target:
                    await run.train(1)
                    steps += 1
                    if steps % 40 == 0:
                        ledger.release(run.gate.version - 20)  # as checkpoints do
                points[steps * BATCH] = (time.perf_counter() - began) / (steps - before) / BATCH * 1e6
            return points

        return run.during(script)


def main() -> None:
    core = core_per_s()
    thousand = durable("loops and ledger, 1,024 in flight", 1024, 60)
    ten_thousand = durable("loops and ledger, 10,240 in flight", 10_240, 60)
    in_memory = make_run(NoJournal(), bound_for(1024), 1024)
    memory = measure("loops in memory, 1,024 in flight", in_memory, 100, PEER_PER_S)
    episodes = durable(
        "loops and ledger, 1,024 episodes of 100 ms",
        2048,
        120,
        concurrent=1024,
        episode_s=0.1,
        peer_per_s=PEER_EPISODES_PER_S,
    )
    grown = flatness()
    alone = Measured("core alone", core, 0.0, 1e6 / core)
    console = table_console()
    console.print(rows_table("control", [alone, memory, thousand, ten_thousand, episodes], TABLE))
    growth = ", ".join(f"{n:,}: {us:.0f} us" for n, us in grown.items())
    console.print(f"time per trajectory as the ledger grows: {growth}")
    figures = list(grown.values())
    document = {
        "trajectories_per_s": round(min(thousand.per_s, ten_thousand.per_s)),
        "p99_admission_ms": round(max(thousand.p99_admission_ms, ten_thousand.p99_admission_ms), 3),
        "core_per_s": round(core),
        "memory_per_s": round(memory.per_s),
        "per_s_1k_in_flight": round(thousand.per_s),
        "per_s_10k_in_flight": round(ten_thousand.per_s),
        "episodes_100ms_per_s": round(episodes.per_s),
        "episodes_100ms_p99_admission_ms": round(episodes.p99_admission_ms, 3),
        "us_per_trajectory_by_ledger_size": {str(n): round(us, 1) for n, us in grown.items()},
        "growth_ratio": round(figures[-1] / figures[1], 3),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
