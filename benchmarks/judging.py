"""Judge processes: questions per second, and the CPU time that a question costs the process that asks.

    python -m benchmarks.judging

A question is a trajectory of 576 tokens with a response of 2 kB. The reward takes no time, so that only the
way there and back is measured. 256 questions wait at any time. The start is the time until the judges can be
asked; what the module of a real reward imports comes on top.
"""

import asyncio
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import uvloop

from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.configs.schema import JudgingConfig, PluginConfig
from slipstream.rollout.reward.judge.judge_pool import JudgePool
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, Trajectory

TOKENS, PROMPT_TOKENS = 576, 64
RESPONSE = "x" * 2000
CALLERS = 256
QUESTIONS = 10_000


class Computing:
    """A reward that is a plain function: a process judges one question at a time."""

    def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        return 1.0


class Waiting:
    """A reward that is a coroutine function: questions overlap."""

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        return 1.0


@dataclass(frozen=True)
class Row:
    """Result of one kind of reward and one number of processes."""

    per_s: float
    caller_us: float
    start_s: float


TABLE: Columns[tuple[str, Row]] = {
    "reward": lambda row: row[0],
    "questions/s": lambda row: f"{row[1].per_s:,.0f}",
    "CPU of the asking process, µs each": lambda row: f"{row[1].caller_us:.0f}",
    "start, s": lambda row: f"{row[1].start_s:.2f}",
}


def trajectory() -> Trajectory:
    sampled_T = np.arange(TOKENS) >= PROMPT_TOKENS
    return Trajectory(
        np.arange(TOKENS),
        sampled_T,
        np.where(sampled_T, -0.5, 0).astype(np.float32),
        np.where(sampled_T, 3, UNSAMPLED).astype(np.int32),
        Finish.STOP,
    )


async def measure(reward: str, processes: int, folder: Path) -> Row:
    began = time.perf_counter()
    plugin = PluginConfig(path=f"benchmarks.judging.{reward}")
    async with JudgePool(JudgingConfig(processes=processes), plugin, folder, "benchmark") as judges:
        start_s = time.perf_counter() - began
        questions = iter(range(QUESTIONS))

        async def ask() -> None:
            for number in questions:
                await judges.score(Prompt(number, "2+2?", "4", {"level": 1}), RESPONSE, trajectory())

        await judges.score(Prompt(0, "2+2?"), RESPONSE, trajectory())
        began, cpu_began = time.perf_counter(), time.process_time()
        await asyncio.gather(*(ask() for _ in range(CALLERS)))
        cpu_s, seconds = time.process_time() - cpu_began, time.perf_counter() - began
    return Row(QUESTIONS / seconds, cpu_s / QUESTIONS * 1e6, start_s)


def main() -> None:
    rows: dict[str, Row] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        for reward, form in (("Computing", "def"), ("Waiting", "async def")):
            for processes in (1, 2):
                name = f"{form} score, {processes} process{'es' if processes > 1 else ''}"
                rows[name] = runner.run(measure(reward, processes, Path(folder)))
    table_console().print(rows_table("judging", rows.items(), TABLE))
    print(json.dumps({name: asdict(row) for name, row in rows.items()}))


if __name__ == "__main__":
    main()
