"""Collection at speed: what a trajectory costs the driver and its collectors, and how long free places wait.

    python -m benchmarks.control

Loops, ledger, connections and collector processes are those of a run. A group goes from its slot over an
assignment, a workflow, the ledger on this folder's disk and a batch of 256 trajectories to the publication
of a version. Engines only sleep, and nobody trains. A trajectory has a prompt of 64 tokens and 512 sampled
ones.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import uvloop

from benchmarks.collection import Load, Run, Usage, own_usage, running
from benchmarks.ledger import restart
from benchmarks.sleeping_engine import LONGEST, PROMPT_TOKENS, EngineTask
from slipstream.backend.monitor.tables import Columns, rows_table, table_console

T = TypeVar("T")
Measure = Callable[[Load, Path], Coroutine[Any, Any, T]]
"""Measures a load, with the ledger in a folder."""

CONCURRENT = {"1k": 1024, "8k": 8192, "32k": 32_768}
LOADS = {
    "1k": "1,024 at a time, 1 collector",
    "1k_two": "1,024 at a time, 2 collectors",
    "8k": "8,192 at a time, 1 collector",
    "8k_two": "8,192 at a time, 2 collectors",
    "32k": "32,768 at a time, 1 collector",
    "32k_two": "32,768 at a time, 2 collectors",
    "n8": "1,024 at a time, groups of 8",
    "judged": "1,024 at a time, a judge process",
    "long": "32,768 tokens each, 64 at a time",
}
TRAJECTORIES = 20_000
"""Least number of trajectories that a load is measured with."""
UNSATURATED = 512
"""Requests of a second each at one time, at which every process is idle most of the time."""
UNSATURATED_STEPS = 16
SIDE_BY_SIDE = 64
"""Long completions that grow at one time."""
SPEED_UP = 20
"""Long completions are streamed at so many times the speed of a real engine, and recorded as much more often:
the driver hears as much of them as of so many times as many at the speed of an engine."""
TOKENS_PER_S = 64
"""Speed of one request to a real engine."""
CHUNK_HEADER = 8


@dataclass(frozen=True)
class Costs:
    """The costs of a load, per trajectory."""

    per_s: float
    driver_us: float
    """CPU of the driver."""
    loop_us: float
    """CPU of the driver's event loop."""
    collector_us: float
    """CPU of the collector processes."""
    write_ratio: float
    """Bytes that driver and collectors have written to files, per byte of payload."""


TABLE: Columns[tuple[str, Costs]] = {
    "load": lambda row: row[0],
    "trajectories/s": lambda row: f"{row[1].per_s:,.0f}",
    "CPU of the driver": lambda row: f"{row[1].driver_us:,.0f} us",
    "of its event loop": lambda row: f"{row[1].loop_us:,.0f} us",
    "of the collectors": lambda row: f"{row[1].collector_us:,.0f} us",
    "bytes written / payload": lambda row: f"{row[1].write_ratio:.2f}",
}


class Meter:
    """Measures what a run uses between two moments."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._began = self._now()

    def _now(self) -> tuple[float, float, list[Usage]]:
        usages = [own_usage(), *(collector.usage() for collector in self._run.collectors)]
        return time.perf_counter(), time.thread_time(), usages

    def costs(self, number: int) -> Costs:
        """Return what each of ``number`` trajectories has cost since the meter was made."""
        (began, loop_began, before), (ended, loop_ended, after) = self._began, self._now()
        cpu_s = [end.cpu_s - begin.cpu_s for begin, end in zip(before, after, strict=True)]
        written = sum(end.written - begin.written for begin, end in zip(before, after, strict=True))
        tokens = self._run.load.engine.tokens
        payload = CHUNK_HEADER + 4 * (PROMPT_TOKENS + tokens) + 4 * tokens
        return Costs(
            per_s=number / (ended - began),
            driver_us=cpu_s[0] / number * 1e6,
            loop_us=(loop_ended - loop_began) / number * 1e6,
            collector_us=sum(cpu_s[1:]) / number * 1e6,
            write_ratio=written / (number * payload),
        )


def measured(measure: Measure[T], load: Load) -> T:
    """Return what ``measure`` gives for a load, with the ledger in a new folder here."""
    with (
        tempfile.TemporaryDirectory(dir=".") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(measure(load, Path(folder)))


async def steady(load: Load, folder: Path) -> Costs:
    """Measure the costs of a trajectory while every place on the engines is in use."""
    steps = max(TRAJECTORIES, load.concurrent) // load.batch
    async with running(load, folder) as run:
        await run.warm_up()
        meter = Meter(run)
        for _ in range(steps):
            await run.step()
        await run.ledger.flushed()
        return meter.costs(steps * load.batch)


async def growing(load: Load, folder: Path) -> Costs:
    """Measure the costs of long completions from their assignments to their batch, which is one."""
    async with running(load, folder) as run:
        meter = Meter(run)
        await run.step()
        await run.ledger.flushed()
        return meter.costs(load.batch)


async def free_place_ms(load: Load, folder: Path) -> float:
    """Return the 99th percentile of the time for which a place on an engine stays free.

    ``load`` has more slots than places, so that prompts wait at any time.
    """
    async with running(load, folder) as run:
        await run.warm_up()
        for _ in range(UNSATURATED_STEPS):
            await run.step()
    waits = [wait for report in run.reports for wait in report.waits[len(report.waits) // 4 :]]
    return float(np.quantile(waits, 0.99)) * 1e3


async def free_slot_ms(load: Load, folder: Path) -> float:
    """Return the 99th percentile of the time from the end of a slot to the begin of the next one's request.

    ``load`` has more places than slots, so that prompts wait for slots. A batch frees its slots all at once.
    """
    async with running(load, folder) as run:
        await run.warm_up()
        for _ in range(UNSATURATED_STEPS):
            await run.step()
        await asyncio.sleep(0.5)  # the last slots are taken
    assert load.slots is not None
    begun = sorted(begun for report in run.reports for begun in report.begun)[load.slots :]
    n = min(len(begun), len(run.freed))
    waits = np.array(begun[:n]) - np.array(run.freed[:n])
    return float(np.quantile(waits[n // 4 :], 0.99)) * 1e3


def steady_costs() -> dict[str, Costs]:
    """Return the costs of all loads that keep every place in use, by the names of their figures."""
    rows: dict[str, Costs] = {}
    for name, concurrent in CONCURRENT.items():
        rows[name] = measured(steady, Load(concurrent))
        rows[f"{name}_two"] = measured(steady, Load(concurrent, collectors=2))
    rows["n8"] = measured(steady, Load(1024, samples=8))
    rows["judged"] = measured(steady, Load(1024, judged=True))
    return rows


def long_completion() -> Costs:
    """Return the costs of a completion of 32,768 tokens among others."""
    engine = EngineTask(LONGEST, LONGEST / TOKENS_PER_S / SPEED_UP, streams=True)
    n = SIDE_BY_SIDE
    return measured(growing, Load(n, engine=engine, slots=n, batch=n, clock_rate=SPEED_UP))


def waits_ms() -> dict[str, float]:
    """Return the waits of free places and of free slots, by the names of their figures."""
    engine = EngineTask(tokens=512, seconds=1.0, spread=0.5)
    places = Load(UNSATURATED, engine=engine)
    slots = Load(4 * UNSATURATED, engine=engine, slots=2 * UNSATURATED)
    return {
        "p99_place_ms": measured(free_place_ms, places),
        "p99_freed_slot_ms": measured(free_slot_ms, slots),
    }


def main() -> None:
    steady_rows, long, waits, large = steady_costs(), long_completion(), waits_ms(), restart()
    rows = {LOADS[name]: costs for name, costs in (steady_rows | {"long": long}).items()}
    table_console().print(rows_table("collection", rows.items(), TABLE))
    document = {
        "driver_us": steady_rows["1k"].driver_us,
        "driver_us_n8": steady_rows["n8"].driver_us,
        **{f"rate_{name}": costs.per_s for name, costs in steady_rows.items()},
        "p99_slot_ms": max(waits.values()),
        "write_ratio": steady_rows["1k"].write_ratio,
        "long_answer_ms": long.driver_us / 1e3,
        "audit_s": large.audit_s,
        "resume_s": large.resume_s,
        **waits,
        "collector_us": steady_rows["1k"].collector_us,
        "loads": {name: asdict(costs) for name, costs in (steady_rows | {"long": long}).items()},
    }
    print(json.dumps(rounded(document)))


def rounded(value: object) -> object:
    """Return the value with four significant digits in each of its numbers."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in cast("dict[str, object]", value).items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
