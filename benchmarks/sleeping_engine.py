"""A collector process whose engines only take time, for ``benchmarks.control`` and ``benchmarks.episodes``.

It runs all that a collector of a run does, with workflow, records, engine pool and connection. Only
the client of the engines, the tokenizer (unless episodes are conversations) and, as a rule, the judges are
stand-ins. The task is one line of JSON on standard input. A further line is a number of seconds for which the
event loop stands still at once. The end of the input ends the process, which then reports on standard output.
"""

import asyncio
import json
import random
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import aiohttp
import numpy as np
import uvloop

from slipstream.backend.monitor.trace_log import TraceLog
from slipstream.configs.schema import JudgingConfig, PluginConfig, RunConfig
from slipstream.rollout.collection.collector.collector_process import collect_in
from slipstream.rollout.collection.collector.parts import Surroundings
from slipstream.rollout.collection.collector.spec import CollectorSpec
from slipstream.rollout.engine.connection import EngineAddress
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.request_trace import RequestTrace
from slipstream.rollout.engine.sampling import Sampling
from slipstream.rollout.reward.judge.judge_pool import JudgePool, JudgeStatus
from slipstream.rollout.reward.value import Judgement
from slipstream.rollout.system.key import Key
from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.tokens.trajectory import Finish, Messages, Prompt, Trajectory

VOCABULARY = 150_000
CONTEXT = 1 << 20
PROMPT_TOKENS = 64
STREAM_INTERVAL = 64
"""Tokens between two parts of a completion that is streamed."""
LONGEST = 32_768

_rng = np.random.default_rng(0)
PROMPT_IDS: list[int] = _rng.integers(0, VOCABULARY, PROMPT_TOKENS).tolist()
TOKENS = array("i", _rng.integers(0, VOCABULARY, LONGEST).tolist())
LOGPROBS = array("f", (-_rng.random(LONGEST, np.float32)).tolist())


@dataclass(frozen=True)
class EngineTask:
    """The work of an engine for each request."""

    tokens: int
    seconds: float
    """Time of a request."""
    spread: float = 0.0
    """Times are spread evenly over ``seconds`` times 1 - spread to 1 + spread."""
    streams: bool = False
    """Completions come in parts of ``STREAM_INTERVAL`` tokens."""


@dataclass(frozen=True)
class CollectorTask:
    """Everything that a collector process must know."""

    name: str
    url: str
    key: str
    folder: str
    """Folder of the trace and of the logs of judges."""
    samples: int
    engine: EngineTask
    judged: bool = False
    """A judge process gives the rewards."""
    clock_rate: float = 1.0
    """Seconds of the records' clock per second."""
    turns: int = 1
    """Completions of an episode. More than one: a conversation with a tool."""


@dataclass
class Report:
    """Times of requests, in seconds of ``time.monotonic``."""

    begun: list[float] = field(default_factory=list[float])
    waits: list[float] = field(default_factory=list[float])
    """Time from the end of each request to the begin of another one in its place."""


class Places:
    """Observes when places on the engines become free, and when they are taken again."""

    def __init__(self) -> None:
        self.report = Report()
        self._free: deque[float] = deque()

    def taken(self) -> None:
        now = time.monotonic()
        self.report.begun.append(now)
        if self._free:
            self.report.waits.append(now - self._free.popleft())

    def freed(self) -> None:
        self._free.append(time.monotonic())


Says = Callable[[Sequence[int]], "array[int]"]
"""Returns the completion of a prompt, of the length that the task names."""


class SleepingEngine:
    """The client of an engine that needs neither a server nor a GPU."""

    def __init__(self, task: EngineTask, places: Places, says: Says) -> None:
        self._task = task
        self._places = places
        self._says = says
        self._random = random.Random(0)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Sampling,
        completion: GrowingCompletion,
        *,
        greedy: bool = False,
        cache_key: str | None = None,
        version: int,
        grown: Callable[[], None] | None = None,
    ) -> None:
        self._places.taken()
        task, start = self._task, len(completion.tokens)
        seconds = task.seconds
        if task.spread:
            seconds *= 1 + task.spread * self._random.uniform(-1, 1)
        part, tokens = STREAM_INTERVAL if task.streams else task.tokens, self._says(input_ids)
        while start < task.tokens:
            await asyncio.sleep(seconds * part / task.tokens)
            completion.add(version, tokens[start : start + part], LOGPROBS[start : start + part])
            start += part
            if grown is not None and start < task.tokens:
                grown()
        completion.finish = Finish.STOP
        self._places.freed()

    async def close(self) -> None: ...


class ConstantTokenizer:
    """Gives the same ids to every prompt."""

    eos_token_id = 0

    def apply_chat_template(self, conversation: Messages, **_: object) -> list[int]:
        return PROMPT_IDS

    def decode(self, token_ids: Sequence[int], **_: object) -> str:
        return "x" * 2000


class Generous:
    """Judges that are asked without a process between."""

    of_groups = False

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> Judgement:
        return Judgement(1.0)

    async def score_group(
        self, prompt: Prompt, responses: Sequence[str], trajectories: Sequence[Trajectory]
    ) -> list[Judgement]:
        raise AssertionError("only a reward of groups judges a group")

    def status(self) -> JudgeStatus:
        return JudgeStatus(0, 0, 0.0, 0, 0)


class Waiting:
    """A reward for judge processes: it takes no time."""

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        return 1.0


def recipe(task: CollectorTask) -> RunConfig:
    """Return the recipe of a collector."""
    config = RunConfig.model_validate(
        {
            "run": {"name": "control", "steps": 1},
            "model": {"path": "nowhere"},
            "data": {"path": "nowhere"},
            "rollout": {
                "max_head_offpolicyness": 0,
                "batch_size": 1,
                "n_samples_per_prompt": task.samples,
                "sampling": {"max_new_tokens": task.engine.tokens},
                "reward": {"path": "benchmarks.sleeping_engine.Waiting"},
            },
        }
    )
    if task.turns == 1:
        return config
    from benchmarks.episodes.conversing import workflow  # imports torch, which others do without

    rollout = config.rollout.model_copy(update={"workflow": workflow(task.turns)})
    return config.model_copy(update={"rollout": rollout})


def speaker(task: CollectorTask) -> tuple[Tokenizer, Says]:
    """Return the tokenizer of a collector, and what its engines say."""
    if task.turns == 1:
        return cast(Tokenizer, ConstantTokenizer()), lambda _: TOKENS
    from benchmarks.episodes.conversing import Speaker

    spoken = Speaker(task.turns, task.engine.tokens)
    return cast(Tokenizer, spoken.tokenizer), spoken.says


async def collect_for(task: CollectorTask, places: Places) -> None:
    """Collect until the driver ends the connection."""
    folder = Path(task.folder)
    spec = CollectorSpec(task.name, 0, task.url, Key(task.key), VOCABULARY, CONTEXT, folder)
    trace = TraceLog(folder, task.name)
    is_connected = False
    tokenizer, says = speaker(task)

    def connect(_: EngineAddress) -> SleepingEngine:
        nonlocal is_connected
        if not is_connected:
            is_connected = True
            print("connected", flush=True)
        return SleepingEngine(task.engine, places, says)

    def trace_request(request: RequestTrace) -> None:
        trace.write("request", **vars(request))

    async with AsyncExitStack() as stack:
        stack.callback(trace.close)
        judges: Generous | JudgePool = Generous()
        if task.judged:
            plugin = PluginConfig(path="benchmarks.sleeping_engine.Waiting")
            judges = await stack.enter_async_context(JudgePool(JudgingConfig(), plugin, folder, task.name))
        surroundings = Surroundings(
            tokenizer,
            judges,
            connect=connect,
            clock=lambda: task.clock_rate * time.monotonic(),
            trace=trace_request,
        )
        await collect_in(surroundings, spec, recipe(task))


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    given = json.loads(await reader.readline())
    task = CollectorTask(**given | {"engine": EngineTask(**given["engine"])})
    places = Places()
    collecting = asyncio.create_task(collect_for(task, places))
    orphaned = asyncio.create_task(_stand_still_as_told(reader))
    await asyncio.wait({collecting, orphaned}, return_when=asyncio.FIRST_COMPLETED)
    for each in (collecting, orphaned):
        each.cancel()
    with suppress(asyncio.CancelledError, aiohttp.ClientError):
        await collecting
    print(json.dumps(asdict(places.report)))


async def _stand_still_as_told(reader: asyncio.StreamReader) -> None:
    """Block the event loop for the seconds of each line, until the input ends."""
    while line := await reader.readline():
        time.sleep(float(line))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
