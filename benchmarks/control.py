"""Admission -> ready -> trained: how many trajectories per second, and how long a free slot waits.

    python -m benchmarks.control

Each group is one trajectory of 512 tokens, batches hold 256 of them: AReaL's setting for its own class, which
keeps everything in memory. Engines and trainer are stand-ins that take no time (or 100 ms per episode): what
is measured is the control plane alone, on one event loop, with the ledger on the disk of this folder.
"""

import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from slipstream.rollout.collect.gate import AdmissionGate
from slipstream.rollout.collect.intake import Assignment, Intake
from slipstream.rollout.collect.journal import Journal, NoJournal
from slipstream.rollout.collect.running import RunningGroups
from slipstream.rollout.control.core import Loss, RolloutControl
from slipstream.rollout.ledger.recovery import open_ledger
from slipstream.rollout.prompts import PromptStream
from slipstream.rollout.trajectory import UNSAMPLED, Finish, Group, Prompt, Trajectory

BATCH = 256
TOKENS = 512
PROMPT_TOKENS = 64
PEER_PER_S = 23_600
"""AReaL's WorkflowExecutor in memory, batch 256, bound 4, 1,024 concurrent, on this kind of machine."""
PEER_EPISODES_PER_S = 2_314
"""The same with episodes of 100 ms."""


def bound_for(in_flight: int) -> int:
    return in_flight // BATCH - 1


_rng = np.random.default_rng(0)
_MASK_T = np.arange(PROMPT_TOKENS + TOKENS) >= PROMPT_TOKENS
_TOKENS_T = _rng.integers(0, 150_000, len(_MASK_T))
_LOGPROBS_T = _rng.random(len(_MASK_T), np.float32)


@lru_cache(maxsize=64)
def versions(version: int) -> np.ndarray:
    return np.where(_MASK_T, np.int32(version), np.int32(UNSAMPLED))


def trajectory(version: int) -> Trajectory:
    """512 sampled tokens behind a prompt. To make the arrays is the engines' part: they are shared."""
    return Trajectory(_TOKENS_T, _MASK_T, _LOGPROBS_T, versions(version), Finish.STOP, reward=1.0)


def core_per_s(total: int = 100_000) -> float:
    """The state machine alone: events of trajectories that are ready at once."""
    core = RolloutControl(BATCH, 4)
    prompt = Prompt(0, "?")
    one = (trajectory(0),)
    began = time.perf_counter()
    while core.counts.trained < total:
        while core.may_admit():
            ticket = core.admit()
            core.generating(ticket.id)
            core.judging(ticket.id)
            core.finished(Group(ticket.id, prompt, ticket.version, one))
        while core.take_batch() is not None:
            core.published(core.version + 1)
    return core.counts.trained / (time.perf_counter() - began)


@dataclass
class Measured:
    per_s: float
    p99_admission_ms: float
    cpu_us: float
    """CPU time per trajectory, all threads."""


class Silent:
    """Hears of lost work and does nothing."""

    def lost(self, loss: Loss, trajectories: Sequence[Trajectory]) -> None: ...
    def episode_failed(self, prompt: Prompt, attempt: int, error: Exception) -> None: ...


class Run:
    """Collection and training over a gate, as the loops of a run do it, with nothing to generate or train."""

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
                # A slot that came free while this waited has been free since then.
                self.waits.append(time.perf_counter() - max(asked, self.free_since))
                groups.create_task(self.episode(assignment))

    async def episode(self, assignment: Assignment) -> None:
        ticket = assignment.ticket
        self.gate.generating(ticket)
        if self.episode_s:
            await asyncio.sleep(self.episode_s)
        one = trajectory(ticket.version)
        self.limit.release()
        self.journal.trajectory(ticket.id, 0, one)
        await self.gate.finished(Group(ticket.id, assignment.prompt, ticket.version, (one,)))

    async def train(self, steps: int) -> None:
        for _ in range(steps):
            await self.gate.batch(60)
            await self.gate.step_begins()
            self.gate.published(self.gate.version + 1)
            self.free_since = time.perf_counter()


def measure(
    in_flight: int, steps: int, *, concurrent: int | None = None, episode_s: float = 0.0, durable: bool = True
) -> Measured:
    """``steps`` batches with at most ``in_flight`` groups between admission and training."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        core = RolloutControl(BATCH, bound_for(in_flight))
        intake = Intake(PromptStream([Prompt(i, "?") for i in range(1000)], shuffle=True, seed=0))
        if durable:
            ledger, _ = open_ledger(
                Path(folder) / "ledger.sqlite", batch_size=BATCH, n_samples=1, bound=core.bound
            )
        journal = ledger if durable else NoJournal()

        async def main() -> Measured:
            run = Run(
                AdmissionGate(core, intake, journal, Silent(), RunningGroups()),
                journal,
                concurrent or in_flight,
                episode_s,
            )
            collecting = asyncio.create_task(run.collect())
            await run.train(2)  # warm
            run.waits.clear()
            cpu, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            await run.train(steps)
            await journal.flushed()
            seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
            collecting.cancel()
            await asyncio.wait({collecting})
            cpu_s = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
            trained = steps * BATCH
            return Measured(
                trained / seconds, float(np.quantile(run.waits, 0.99)) * 1e3, cpu_s / trained * 1e6
            )

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as `slipstream train` does
                return runner.run(main())
        finally:
            if durable:
                ledger.close()


def flatness(total: int = 100_000) -> list[tuple[int, float]]:
    """(trajectories in the ledger, microseconds per trajectory) while the ledger grows from 1k on."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        core = RolloutControl(BATCH, 3)
        intake = Intake(PromptStream([Prompt(i, "?") for i in range(1000)], shuffle=True, seed=0))
        ledger, _ = open_ledger(Path(folder) / "ledger.sqlite", batch_size=BATCH, n_samples=1, bound=3)

        async def main() -> list[tuple[int, float]]:
            run = Run(AdmissionGate(core, intake, ledger, Silent(), RunningGroups()), ledger, 1024, 0.0)
            collecting = asyncio.create_task(run.collect())
            points, steps = [], 0
            for target in (1_000, 11_000, 45_000, 55_000, 90_000, total):
                before, began = steps, time.perf_counter()
                while steps * BATCH < target:
                    await run.train(1)
                    steps += 1
                    if steps % 40 == 0:
                        ledger.release(core.version - 20)  # as checkpoints do
                points.append((steps * BATCH, (time.perf_counter() - began) / (steps - before) / BATCH * 1e6))
            collecting.cancel()
            await asyncio.wait({collecting})
            return points

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(main())
        finally:
            ledger.close()


def main() -> None:
    core = core_per_s()
    thousand = measure(1024, 60)
    ten_thousand = measure(10_240, 60)
    memory = measure(1024, 100, durable=False)
    episodes = measure(2048, 120, concurrent=1024, episode_s=0.1)
    grown = flatness()
    table = Table(
        "what", "trajectories/s", "p99 wait of a free slot", "CPU per trajectory", "peer, in memory"
    )

    def row(what: str, it: Measured, peer: int | None = None) -> None:
        table.add_row(
            what,
            f"{it.per_s:,.0f}",
            f"{it.p99_admission_ms:.2f} ms",
            f"{it.cpu_us:.0f} us",
            f"{peer:,}" if peer else "",
        )

    table.add_row("core alone", f"{core:,.0f}", "", f"{1e6 / core:.1f} us", "")
    row("loops in memory, 1,024 in flight", memory, PEER_PER_S)
    row("loops and ledger, 1,024 in flight", thousand)
    row("loops and ledger, 10,240 in flight", ten_thousand)
    row("loops and ledger, 1,024 episodes of 100 ms", episodes, PEER_EPISODES_PER_S)
    console = Console()
    console.print(table)
    growth = ", ".join(f"{n:,}: {us:.0f} us" for n, us in grown)
    console.print(f"time per trajectory as the ledger grows: {growth}")
    print(
        json.dumps(
            {
                "trajectories_per_s": round(min(thousand.per_s, ten_thousand.per_s)),
                "p99_admission_ms": round(max(thousand.p99_admission_ms, ten_thousand.p99_admission_ms), 3),
                "core_per_s": round(core),
                "memory_per_s": round(memory.per_s),
                "per_s_1k_in_flight": round(thousand.per_s),
                "per_s_10k_in_flight": round(ten_thousand.per_s),
                "episodes_100ms_per_s": round(episodes.per_s),
                "episodes_100ms_p99_admission_ms": round(episodes.p99_admission_ms, 3),
                "us_per_trajectory_by_ledger_size": {str(n): round(us, 1) for n, us in grown},
                "growth_ratio": round(grown[-1][1] / grown[1][1], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
