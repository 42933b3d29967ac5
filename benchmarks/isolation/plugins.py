"""What the watched run calls of its user's code: each writes down when it was called."""

import asyncio
import os
import random
import time

from slipstream.rollout.reward import FinalAnswer
from slipstream.rollout.reward.live import JudgedTurn, Verdict
from slipstream.rollout.tokens.trajectory import Messages, Prompt, Trajectory
from slipstream.rollout.workflow import SingleTurn, WorkflowContext


class Events:
    """A file with a line for each event: its time, in seconds since the epoch. Processes may share it."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self) -> None:
        os.write(self._descriptor, f"{time.time():.3f}\n".encode())


class Slow:
    """An episode in an environment that takes its time before it asks: latency bounds the rate of groups, and
    no processor does.
    """

    def __init__(self, seconds: float) -> None:
        """``seconds``: the mean. Times differ, so that groups do not come in waves."""
        self._seconds = seconds
        self._rng = random.Random()
        self._episode = SingleTurn()

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Trajectory:
        await asyncio.sleep(self._seconds * self._rng.uniform(0.65, 1.35))
        return await self._episode.run(prompt, context)


class Reward(FinalAnswer):
    """The quickstart's reward."""

    def __init__(self, events: str) -> None:
        super().__init__(marker="#")
        self._events = Events(events)

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        self._events.note()
        return await super().score(prompt, response, trajectory)


class Judge:
    """Likes answers that come to a result."""

    def __init__(self, events: str) -> None:
        self._events = Events(events)

    async def judge(self, turn: JudgedTurn, next_state: Messages) -> Verdict:
        self._events.note()
        return Verdict(float("#" in turn.text))
