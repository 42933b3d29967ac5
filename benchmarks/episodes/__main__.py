"""Two thousand conversations with a slow tool at one time: are the engines kept busy, and the driver free?

    python -m benchmarks.episodes [--seconds 20]

Loops, ledger, connections and collector processes are those of a run, and so are chat template, tokenizer,
SGLang's parser of calls and `ToolUse`. Engines only sleep, and nobody trains. An episode has four completions
of 128 tokens, and between them a tool takes 100 ms. `share_of_bound` is the number of completions over the
number that the engines can give. Then one of the two collectors is killed, another one takes its place, and
one stands still for 30 s, as if code of a user blocked it. `others` are the rates of the collector beside it
meanwhile, over its rate before. `driver_lag_p99_ms` is the lag of the driver's event loop in the worst of the
three times. Nothing may be lost: a failed attempt or a lost group ends the benchmark, and `discrepancies` is
what the ledger's audit finds.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import uvloop

from benchmarks.collection import CollectorProcess, Load, Run, own_usage, running
from benchmarks.episodes.conversing import TOOL_S
from benchmarks.sleeping_engine import EngineTask, Report
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.rollout.ledger.audit.account import audit_ledger

EPISODES, TURNS, SAMPLES = 2000, 4, 8
ENGINE = EngineTask(tokens=128, seconds=2.0, spread=0.5)
LOAD = Load(EPISODES, collectors=2, samples=SAMPLES, engine=ENGINE, turns=TURNS)

EPISODE_S = TURNS * ENGINE.seconds + (TURNS - 1) * TOOL_S
WARM_UP_S = 2 * EPISODE_S
"""Time until episodes begin and end evenly."""
RESTART_S = 2.0
"""Time from the end of a collector to the start of the one in its place."""
BLOCKED_S = 30.0
LOOK_S = 0.005
"""Time between two looks at the driver's event loop."""

Span = tuple[float, float]
"""Begin and end, in seconds of ``time.monotonic``."""


@dataclass
class Lag:
    """How late the driver's event loop is."""

    looks: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """(time, lag in seconds) of each look."""

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            due = time.monotonic() + LOOK_S
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            self.looks.append((now, max(0.0, now - due)))

    def p99_ms(self, span: Span) -> float:
        """Return the 99th percentile of the lag in a time, in milliseconds."""
        return float(np.quantile([lag for now, lag in self.looks if span[0] <= now < span[1]], 0.99)) * 1e3


@dataclass(frozen=True)
class Course:
    """What was done to the collectors, and when."""

    calm: Span
    killed: Span
    blocked: Span
    completions: float
    """Completions per second while it was calm."""
    driver_share: float
    """CPU time of the driver per second while it was calm."""
    collectors_share: float
    """CPU time of both collectors per second while it was calm."""
    reports: dict[str, Report]
    """Of the collectors ``first``, which has taken the place of the one that was killed, and ``second``."""
    lag: Lag


@asynccontextmanager
async def training(run: Run) -> AsyncIterator[None]:
    """Take batches inside the block, one after the other."""

    async def steps() -> None:
        while True:
            await run.step()

    task = asyncio.create_task(steps())
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})


async def course(folder: Path, seconds: float) -> Course:
    """Take the collectors through calm, a kill and a block."""
    lag = Lag()
    async with running(LOAD, folder) as run:
        killed, second = run.collectors
        watching = asyncio.create_task(lag.watch())
        async with training(run):
            await asyncio.sleep(WARM_UP_S)
            before = counts(run)
            calm = await span(seconds)
            driver_s, collectors_s, tokens = (counts(run) - before) / (calm[1] - calm[0])
            while_killed, first = await asyncio.gather(span(seconds), replaced(run, killed))
            await asyncio.sleep(WARM_UP_S)
            second_blocked = span(BLOCKED_S)
            first.stand_still(BLOCKED_S)
            while_blocked = await second_blocked
            await asyncio.sleep(WARM_UP_S)
        watching.cancel()
    place = {id(collector): report for collector, report in zip(run.collectors, run.reports, strict=True)}
    return Course(
        calm,
        while_killed,
        while_blocked,
        float(tokens) / ENGINE.tokens,
        float(driver_s),
        float(collectors_s),
        {"first": place[id(first)], "second": place[id(second)]},
        lag,
    )


def counts(run: Run) -> npt.NDArray[np.float64]:
    """Return the seconds of CPU of the driver and of its collectors so far, and the tokens they have got."""
    collectors_s = sum(collector.usage().cpu_s for collector in run.collectors)
    return np.array([own_usage().cpu_s, collectors_s, run.roster.tokens_generated])


async def replaced(run: Run, collector: CollectorProcess) -> CollectorProcess:
    """Kill a collector, and start another one in its place."""
    run.collectors.remove(collector)
    await collector.killed()
    await asyncio.sleep(RESTART_S)
    other = await run.start_collector()
    await other.connected()
    return other


async def span(seconds: float) -> Span:
    """Wait, and return from when to when."""
    began = time.monotonic()
    await asyncio.sleep(seconds)
    return began, time.monotonic()


def rate(report: Report, during: Span) -> float:
    """Return the completions per second that a collector has asked for."""
    count = sum(during[0] <= begun < during[1] for begun in report.begun)
    return count / (during[1] - during[0])


def main() -> None:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.episodes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "--seconds", type=float, default=20.0, help="duration of the calm time, and of a kill"
    )
    seconds = options.parse_args().seconds
    with (
        tempfile.TemporaryDirectory(dir=".") as scratch,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        folder = Path(scratch)
        seen = runner.run(course(folder, seconds))
        audit, _ = audit_ledger(folder)
    table_console().print(rows_table("2,000 conversations with a tool", rows(seen), TABLE))
    print(json.dumps(document(seen, audit.discrepancies)))


@dataclass(frozen=True)
class Row:
    """One time of the course."""

    name: str
    lag_ms: float
    rates: dict[str, float]
    """Completions per second, of the collectors that are known."""


TABLE: Columns[Row] = {
    "": lambda row: row.name,
    "lag of the driver's loop, p99": lambda row: f"{row.lag_ms:.1f} ms",
    "completions/s": lambda row: ", ".join(f"{name} {each:,.0f}" for name, each in row.rates.items()),
}


def rows(seen: Course) -> list[Row]:
    """Return the rows of the table."""
    first, second = (seen.reports[name] for name in ("first", "second"))
    return [
        Row(
            "calm", seen.lag.p99_ms(seen.calm), {"both": seen.completions, "second": rate(second, seen.calm)}
        ),
        Row("a collector is killed", seen.lag.p99_ms(seen.killed), {"second": rate(second, seen.killed)}),
        Row(
            "the first stands still",
            seen.lag.p99_ms(seen.blocked),
            {"first": rate(first, seen.blocked), "second": rate(second, seen.blocked)},
        ),
    ]


def document(seen: Course, discrepancies: list[str]) -> dict[str, object]:
    """Return the figures. The lag is that of the worst time of the course."""
    spans = {"calm": seen.calm, "killed": seen.killed, "blocked": seen.blocked}
    lags_ms = {name: round(seen.lag.p99_ms(span), 1) for name, span in spans.items()}
    second = seen.reports["second"]
    return {
        "share_of_bound": round(seen.completions * ENGINE.seconds / EPISODES, 3),
        "driver_lag_p99_ms": max(lags_ms.values()),
        "others": {
            name: round(rate(second, spans[name]) / rate(second, seen.calm), 3)
            for name in ("killed", "blocked")
        },
        "lags_ms": lags_ms,
        "completions_per_s": round(seen.completions),
        "driver_us": round(seen.driver_share / seen.completions * 1e6),
        "collector_us": round(seen.collectors_share / seen.completions * 1e6),
        "discrepancies": len(discrepancies),
    }


if __name__ == "__main__":
    main()
