"""Code of a user's that fails: rewards, workflows, a filter, a tool, an environment and an agent."""

import asyncio
import os
import signal
import sys
import time

from slipstream.rollout.tokens.trajectory import Trajectory, TrajectoryBuilder
from slipstream.rollout.workflow.environment.tools import Tool

HERE = "tests.wrong_inputs.their_code"


# ---- rewards


def raises(prompt, response, trajectory):
    return float(prompt.metadata["answer_idx"] == response)


def returns_nothing(prompt, response, trajectory):
    return None


def returns_nan(prompt, response, trajectory):
    return float("nan")


def returns_text(prompt, response, trajectory):
    return "1.0"


def returns_other_key(prompt, response, trajectory):
    return {"accuracy": 1.0}


def blocks(prompt, response, trajectory):
    time.sleep(1e6)


def blocks_and_ignores_sigterm(prompt, response, trajectory):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


async def never_answers(prompt, response, trajectory):
    await asyncio.Event().wait()


def exits(prompt, response, trajectory):
    os._exit(3)


def leaves(prompt, response, trajectory):
    sys.exit("no such file")


def kills_itself(prompt, response, trajectory):
    os.kill(os.getpid(), signal.SIGKILL)


def too_few(prompt, responses, trajectories):
    return [1.0]


class CannotBegin:
    def __init__(self):
        self.table = {}["table.json"]

    def score(self, prompt, response, trajectory):
        return 1.0


# ---- workflows


async def _answered(context) -> Trajectory:
    builder = TrajectoryBuilder([5, 6])
    builder.add_completion(await context.generator.generate([5, 6], context.sampling))
    return builder.build()


class Sound:
    async def run(self, prompt, context):
        return await _answered(context)


class Raises:
    async def run(self, prompt, context):
        await _answered(context)
        raise ValueError(f"no level {prompt.metadata['level']}")


class ReturnsNothing:
    async def run(self, prompt, context):
        await _answered(context)


class ReturnsDict:
    async def run(self, prompt, context):
        return {"tokens": [1]}


class ReturnsPromptAlone:
    async def run(self, prompt, context):
        return TrajectoryBuilder([5, 6]).build()


class NeverReturns:
    async def run(self, prompt, context):
        await asyncio.Event().wait()


class CancelsItself:
    async def run(self, prompt, context):
        asyncio.current_task().cancel()
        await asyncio.sleep(1)


class Leaves:
    async def run(self, prompt, context):
        sys.exit(4)


class TurnedAway:
    async def run(self, prompt, context):
        trajectory = await _answered(context)
        trajectory.tokens_T[-1] = 10**6
        return trajectory


class CallsTool:
    async def run(self, prompt, context):
        await Tool(f"{HERE}.broken_tool", timeout_s=1.0).result('{"word": "x"}')


async def broken_tool(word: str) -> str:
    """Look a word up."""
    return {}[word]


# ---- others


class RaisingFilter:
    def keep(self, group):
        return group.trajectories[0].scores > 0


class World:
    async def reset(self, prompt):
        raise ConnectionError("no world at port 80")

    async def step(self, action): ...

    async def close(self): ...


class SlowWorld(World):
    async def reset(self, prompt):
        await asyncio.sleep(1e6)


def agent(base_url, api_key, prompt, metadata):
    raise LookupError("no plan")


async def awaiting_agent(base_url, api_key, prompt, metadata):
    raise LookupError("no plan")
