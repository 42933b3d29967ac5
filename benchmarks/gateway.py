"""A gateway process: what it adds to an engine's own endpoint, and how many turns it serves.

    python -m benchmarks.gateway

Gateway, driver, ledger and journal are those of a run, each in a process of its own. The engine is a process
that speaks SGLang's /generate and has no model: its tokens come at given times.

    latency   a token every 20 ms. Clients ask the engine directly and through the gateway in turn, and look
              at the time of the first token and at the delay of each further one.
    turns     32 tokens at once. Clients talk, four turns to a conversation, as fast as they are answered.
              Meanwhile the delay of the driver's event loop is measured every 5 ms.

Quantiles are medians over rounds, so that a pause of the machine counts once. Nothing is asserted.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import aiohttp
import numpy as np
import orjson
import uvloop

from benchmarks.collection import usage_of
from benchmarks.harness import parser
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from tests.chat_model import build_tokenizer, write_chat_model
from tests.http_engine import EngineProcess, Pace
from tests.live_run import LiveRun

INTERVAL_S = 0.02
TOKENS = 32
CONCURRENT = (1, 8, 32)
LEAST_REQUESTS = 16
"""Requests of a side in a round."""
ROUNDS = 5
WARM_UP = 64
"""Requests before anything is measured."""

CLIENTS = 32
"""Clients that talk at one time while turns are counted."""
TURNS = 4
"""Turns of a conversation."""
SECONDS = 8.0
"""Length of a round in which turns are counted."""
QUESTION = "What is the sum of the first hundred odd numbers? "

PROMPT: list[int] = build_tokenizer().encode(QUESTION)


# ---- latency


@dataclass
class Delays:
    """Delays of one side in one round, in seconds."""

    first: list[float] = field(default_factory=list[float])
    """Time from the request to the first token, for each request."""
    later: list[float] = field(default_factory=list[float])
    """Delay of each further token against the pace of the engine, counted from the request."""
    gaps: list[float] = field(default_factory=list[float])
    """Time between two tokens."""


@dataclass(frozen=True)
class Side:
    """A way to ask."""

    name: str
    url: str
    body: dict[str, object]
    shows_token: Callable[[bytes], bool]
    """Returns whether an event has a token."""


@dataclass(frozen=True)
class Added:
    """What a side adds to asking the engine directly, in milliseconds."""

    first_p50: float
    first_p99: float
    later_p50: float
    later_p99: float
    gap_p50: float
    gap_p99: float


ADDED: Columns[tuple[str, Added]] = {
    "added, ms": lambda row: row[0],
    "first token, p50": lambda row: f"{row[1].first_p50:.1f}",
    "p99": lambda row: f"{row[1].first_p99:.1f}",
    "further tokens, p50": lambda row: f"{row[1].later_p50:.1f}",
    "p99 ": lambda row: f"{row[1].later_p99:.1f}",
    "gaps, p50": lambda row: f"{row[1].gap_p50:.1f}",
    "p99  ": lambda row: f"{row[1].gap_p99:.1f}",
}


def sides(engine: str, gateway: str) -> list[Side]:
    """Return the engine itself, and the endpoints of the gateway that stream its tokens."""
    native = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": TOKENS}, "stream": True}
    chat = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS, "stream": True}
    return [
        Side("engine", f"{engine}/generate", native, lambda event: b"output_ids" in event),
        Side(
            "/v1/chat/completions",
            f"{gateway}/v1/chat/completions",
            chat,
            lambda event: b'"content":"' in event and b'"content":""' not in event,
        ),
        Side("/generate", f"{gateway}/generate", native, lambda event: b"output_ids" in event),
    ]


async def stream(session: aiohttp.ClientSession, side: Side, delays: Delays) -> None:
    """Send a request, and note when its tokens come."""
    began = last = time.perf_counter()
    count, buffer = 0, b""
    async with session.post(side.url, data=orjson.dumps(side.body), headers=JSON) as reply:
        assert reply.status == 200, await reply.text()
        async for piece in reply.content.iter_any():
            now = time.perf_counter()
            *events, buffer = (buffer + piece).split(b"\n\n")
            for event in events:
                if not side.shows_token(event):
                    continue
                count += 1
                if count == 1:
                    delays.first.append(now - began)
                else:
                    delays.later.append(now - began - count * INTERVAL_S)
                    delays.gaps.append(now - last)
                last = now
    assert count, "an answer without a token"


JSON = {"content-type": "application/json"}


async def ask(session: aiohttp.ClientSession, side: Side, concurrent: int) -> Delays:
    """Ask with so many clients at a time, whose requests begin evenly spread over the time of one."""
    delays = Delays()
    each = max(1, LEAST_REQUESTS // concurrent)

    async def client(number: int) -> None:
        await asyncio.sleep(number / concurrent * TOKENS * INTERVAL_S)
        for _ in range(each):
            await stream(session, side, delays)

    await asyncio.gather(*(client(number) for number in range(concurrent)))
    return delays


def quantile_ms(values: Sequence[float], q: float) -> float:
    return float(np.quantile(values, q)) * 1e3


def added(direct: Sequence[Delays], side: Sequence[Delays]) -> Added:
    """Return the difference of quantiles in each round, and its median over the rounds."""

    def difference(values: Callable[[Delays], Sequence[float]], q: float) -> float:
        rounds = zip(direct, side, strict=True)
        return median(quantile_ms(values(b), q) - quantile_ms(values(a), q) for a, b in rounds)

    return Added(
        *(
            difference(values, q)
            for values in (lambda d: d.first, lambda d: d.later, lambda d: d.gaps)
            for q in (0.5, 0.99)
        )
    )


async def latency(engine: str, run: LiveRun) -> dict[str, Added]:
    """Measure all sides in turn."""
    rows: dict[str, Added] = {}
    async with connected(run) as session:
        ways = sides(engine, run.url)
        for side in ways:
            await asyncio.gather(*(stream(session, side, Delays()) for _ in range(WARM_UP)))
        for concurrent in CONCURRENT:
            rounds: dict[str, list[Delays]] = {side.name: [] for side in ways}
            for _ in range(ROUNDS):
                for side in ways:
                    rounds[side.name].append(await ask(session, side, concurrent))
            direct, *others = rounds.items()
            for name, delays in others:
                rows[f"{name}, {concurrent} at a time"] = added(direct[1], delays)
    return rows


# ---- turns


@dataclass(frozen=True)
class Served:
    """Turns that a gateway process has served, and what they have cost."""

    per_s: float
    gateway_ms: float
    """CPU time of the gateway process for each turn."""
    driver_ms: float
    lag_p50_ms: float
    """Lag of the driver's event loop meanwhile."""
    lag_p99_ms: float


SERVED: Columns[tuple[str, Served]] = {
    "chat": lambda row: row[0],
    "turns/s": lambda row: f"{row[1].per_s:.0f}",
    "CPU of the gateway, ms each": lambda row: f"{row[1].gateway_ms:.2f}",
    "of the driver": lambda row: f"{row[1].driver_ms:.2f}",
    "lag of the driver's loop, p50, ms": lambda row: f"{row[1].lag_p50_ms:.1f}",
    "p99": lambda row: f"{row[1].lag_p99_ms:.1f}",
}


async def talk(session: aiohttp.ClientSession, url: str, *, streams: bool) -> AsyncIterator[None]:
    """Hold a conversation, as clients do that repeat it in each request. Yields after each turn."""
    messages: list[dict[str, str]] = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": QUESTION})
        body = orjson.dumps({"messages": messages, "stream": streams})
        async with session.post(f"{url}/v1/chat/completions", data=body, headers=JSON) as reply:
            content = await reply.read()
            assert reply.status == 200, content
        messages.append({"role": "assistant", "content": _answer(content, streams=streams)})
        yield


def _answer(content: bytes, *, streams: bool) -> str:
    if not streams:
        return orjson.loads(content)["choices"][0]["message"]["content"]
    events = [event.removeprefix(b"data: ") for event in content.split(b"\n\n")]
    chunks = [orjson.loads(event) for event in events if event.startswith(b"{")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


async def talk_for(session: aiohttp.ClientSession, url: str, seconds: float, *, streams: bool) -> int:
    """Talk with all clients for so long. Return the number of turns."""
    end, turns = time.perf_counter() + seconds, 0

    async def client() -> None:
        nonlocal turns
        while time.perf_counter() < end:
            async for _ in talk(session, url, streams=streams):
                turns += time.perf_counter() < end

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return turns


async def served(run: LiveRun, *, streams: bool) -> Served:
    """Count turns in several rounds, and return the medians."""
    rounds: list[Served] = []
    async with connected(run) as session:
        await talk_for(session, run.url, 2.0, streams=streams)
        for _ in range(ROUNDS):
            before, gateway = await asyncio.to_thread(run.lag), usage_of(run.pid())
            turns = await talk_for(session, run.url, SECONDS, streams=streams)
            after = await asyncio.to_thread(run.lag)
            rounds.append(
                Served(
                    turns / SECONDS,
                    (usage_of(run.pid()).cpu_s - gateway.cpu_s) / turns * 1e3,
                    (after.cpu_s - before.cpu_s) / turns * 1e3,
                    quantile_ms(after.lags_s, 0.5),
                    quantile_ms(after.lags_s, 0.99),
                )
            )
    names = Served.__dataclass_fields__
    return Served(*(median(getattr(each, name) for each in rounds) for name in names))


def connected(run: LiveRun) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers=run.headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=120),
    )


# ---- the benchmark


@contextmanager
def running(pace: Pace) -> Iterator[tuple[str, LiveRun]]:
    """Run an engine, a driver and a gateway inside the block. Files are on this folder's disk."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        model = write_chat_model(Path(folder) / "model", weights=False)
        with EngineProcess(pace) as engine, LiveRun(Path(folder), model, [engine.url]) as run:
            yield engine.url, run


def main() -> None:
    parser(__doc__).parse_args()
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        running(Pace(TOKENS, INTERVAL_S)) as (engine, run),
    ):
        rows = runner.run(latency(engine, run))
    table_console().print(rows_table("gateway", rows.items(), ADDED))
    turns: dict[str, Served] = {}
    for name, each in (("", TOKENS), (", token by token", 1)):
        with (
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            running(Pace(TOKENS, tokens_per_event=each)) as (_, run),
        ):
            for streams in (False, True):
                kind = ("streamed" if streams else "whole") + name
                turns[kind] = runner.run(served(run, streams=streams))
    table_console().print(rows_table("turns", turns.items(), SERVED))
    print(
        json.dumps(
            {
                "added_p50_ms": max(max(row.first_p50, row.later_p50) for row in rows.values()),
                "added_p99_ms": max(max(row.first_p99, row.later_p99) for row in rows.values()),
                "turns_per_s": turns["whole"].per_s,
                "driver_lag_p99_ms": max(row.lag_p99_ms for row in turns.values()),
                "added_ms": {name: asdict(row) for name, row in rows.items()},
                "turns": {name: asdict(row) for name, row in turns.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
