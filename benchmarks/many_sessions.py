"""A key with 10,000 sessions beside another one: what the other key waits for its answers.

    python -m benchmarks.many_sessions

Two runs are side by side, each with a gateway, driver, ledger and journal as a run has them, and a scripted
engine whose answers are all equal. In both, a few clients of one key talk. In one of them another key holds
10,000 sessions with a turn each, and in each part sends one kind of request all the time. Rounds of both runs
take turns, so that the load of the machine is that of both. Quantiles are medians over rounds. `ratio` is the
p99 beside the other key over the p99 without it.
"""

import asyncio
import gc
import json
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import aiohttp
import orjson
import uvloop

from benchmarks.gateway import JSON, quantile_ms
from benchmarks.harness import parser
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.rollout.gateway.keys import add_key, keys_file
from tests.chat_model import write_chat_model
from tests.http_engine import EngineProcess, Pace
from tests.live_run import LiveRun

SESSIONS = 10_000
FILLERS = 16
"""Clients that open the sessions at the same time."""
CLIENTS, TURNS, TOKENS = 4, 4, 8
"""Clients whose answers are measured, turns of their conversations, and tokens of an answer."""
ROUNDS, SECONDS = 5, 3.0
EVERY_S, LIST_EVERY_S = 0.05, 1.0
"""Time between two requests of the key with many sessions, and between two of its lists of them all."""

Messages = list[dict[str, str]]


@dataclass
class Gateway:
    """A run, as the clients of one key see it."""

    http: aiohttp.ClientSession
    url: str

    async def chat(self, messages: Messages, session: str = "") -> str:
        """Return an answer. ``session``: its name; empty: the client gives it none."""
        headers = JSON | ({"x-session-id": session} if session else {})
        body = orjson.dumps({"messages": messages})
        content = await self.post("/v1/chat/completions", body, headers)
        return orjson.loads(content)["choices"][0]["message"]["content"]

    async def post(self, path: str, body: bytes, headers: Mapping[str, str] = JSON) -> bytes:
        async with self.http.post(f"{self.url}{path}", data=body, headers=headers) as reply:
            content = await reply.read()
            assert reply.status == 200, content
            return content


def question(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"Is {number} a prime number?"}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def answered(number: int, answer: str) -> Messages:
    return [question(number), {"role": "assistant", "content": answer}, {"role": "user", "content": "Why?"}]


async def fill(gateway: Gateway) -> str:
    """Open the sessions, and return the answer of each. Every other one has a name."""
    numbers, answers = iter(range(SESSIONS)), [""]

    async def client() -> None:
        for number in numbers:
            messages = [system("Be brief."), question(number)]
            answers[0] = await gateway.chat(messages, f"session-{number}" if number % 2 else "")

    await asyncio.gather(*(client() for _ in range(FILLERS)))
    return answers[0]


def kinds_of(answer: str) -> dict[str, Callable[[Gateway, int], Coroutine[object, object, None]]]:
    """Return the kinds of requests of the key with many sessions."""

    async def named(gateway: Gateway, n: int) -> None:
        number = 2 * n % SESSIONS + 1
        await gateway.chat([system("Be brief."), *answered(number, answer)], f"session-{number}")

    async def by_history(gateway: Gateway, n: int) -> None:
        await gateway.chat([system("Be brief."), *answered(2 * n % SESSIONS, answer)])

    async def rewritten(gateway: Gateway, n: int) -> None:
        await gateway.chat([system(f"Be brief. It is {n} o'clock."), *answered(2 * n % SESSIONS, answer)])

    async def begun(gateway: Gateway, n: int) -> None:
        await gateway.chat([question(SESSIONS + n)])

    async def rewarded(gateway: Gateway, n: int) -> None:
        reward = {"session": f"session-{2 * n % SESSIONS + 1}", "turn": 0, "value": 1}
        async with gateway.http.post(f"{gateway.url}/rewards", json=reward) as reply:
            assert reply.status in (200, 202, 409), await reply.read()

    async def listed(gateway: Gateway, n: int) -> None:
        async with gateway.http.get(f"{gateway.url}/sessions") as reply:
            # Thousands of objects would have this process look for garbage, and its other clients wait.
            assert (await reply.read()).count(b'"session":') >= SESSIONS

    return {
        "continues named sessions": named,
        "continues sessions by their history": by_history,
        "rewrites histories": rewritten,
        "begins sessions": begun,
        "rewards sessions": rewarded,
        "lists all sessions": listed,
    }


async def talk(gateway: Gateway) -> list[float]:
    """Talk with all clients for the time of a round. Return the times of their answers, in seconds."""
    clock = asyncio.get_running_loop().time
    end, times = clock() + SECONDS, list[float]()

    async def client(number: int) -> None:
        while clock() < end:
            messages: Messages = []
            for turn in range(TURNS):
                messages.append(question(number + turn))
                began = clock()
                answer = await gateway.chat(messages)
                times.append(clock() - began)
                messages.append({"role": "assistant", "content": answer})

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return times


async def talk_beside(
    gateway: Gateway, send: Callable[[int], Awaitable[object]], every_s: float, numbers: Iterator[int]
) -> list[float]:
    """Talk while another key sends requests, each at its time but never two at once."""

    talked = asyncio.Event()

    async def sending() -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while not talked.is_set():
            await send(next(numbers))
            due_s = max(due_s + every_s, loop.time())
            await asyncio.sleep(due_s - loop.time())

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(sending())
        times = await talk(gateway)
        talked.set()
    return times


@dataclass(frozen=True)
class Waits:
    """What the clients of a key wait for, in milliseconds."""

    alone_p50: float
    alone_p99: float
    beside_p50: float
    beside_p99: float

    @property
    def ratio(self) -> float:
        return round(self.beside_p99 / self.alone_p99, 2)


TABLE: Columns[tuple[str, Waits]] = {
    "the other key": lambda row: row[0],
    "without it: p50, ms": lambda row: f"{row[1].alone_p50:.1f}",
    "p99": lambda row: f"{row[1].alone_p99:.1f}",
    "beside it: p50, ms": lambda row: f"{row[1].beside_p50:.1f}",
    "p99 ": lambda row: f"{row[1].beside_p99:.1f}",
    "ratio of p99": lambda row: f"{row[1].ratio:.2f}",
}


async def measure(runs: Sequence[LiveRun]) -> dict[str, Waits]:
    """Measure beside each kind of request. ``runs``: without and with many sessions."""
    async with AsyncExitStack() as stack:
        keys = [add_key(keys_file(run.config.gateway, run.config.run.folder), "bob") for run in runs]
        places = [*zip(keys, runs, strict=True), (runs[1].key, runs[1])]
        without, beside, other = [
            Gateway(await stack.enter_async_context(connected(key)), run.url) for key, run in places
        ]
        kinds = kinds_of(await fill(other))
        gc.collect()
        gc.freeze()
        await asyncio.gather(talk(without), talk(beside))
        rows: dict[str, Waits] = {}
        for kind, send in kinds.items():
            every_s, numbers = LIST_EVERY_S if send.__name__ == "listed" else EVERY_S, count()
            rounds = [
                (await talk(without), await talk_beside(beside, partial(send, other), every_s, numbers))
                for _ in range(ROUNDS)
            ]
            quantiles = [
                median(quantile_ms(each[side], q) for each in rounds) for side in (0, 1) for q in (0.5, 0.99)
            ]
            rows[kind] = Waits(*quantiles)
        return rows


def connected(key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers={"authorization": f"Bearer {key}"},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=120),
    )


def main() -> None:
    parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder, ExitStack() as stack:
        model = write_chat_model(Path(folder) / "model", weights=False)
        engine = stack.enter_context(EngineProcess(Pace(TOKENS)))
        places = [Path(folder, name) for name in ("without", "beside")]
        for place in places:
            place.mkdir()
        runs = [stack.enter_context(LiveRun(place, model, [engine.url])) for place in places]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rows = runner.run(measure(runs))
    table_console().print(rows_table("10,000 sessions of another key", rows.items(), TABLE))
    ratios = {kind: row.ratio for kind, row in rows.items()}
    print(
        json.dumps(
            {
                "worst_ratio": max(ratios.values()),
                "ratio": ratios,
                "ms": {kind: asdict(row) for kind, row in rows.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
