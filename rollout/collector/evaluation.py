"""Evaluation episodes: greedy completions of held-out prompts. Nothing of them is recorded or trained."""

import asyncio
from collections.abc import Sequence

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.collector.episodes import EpisodeFailed, Episodes
from slipstream.rollout.collector.groups import Judge, as_prompt
from slipstream.rollout.collector.outbox import Outbox
from slipstream.rollout.collector.recording import GrowingGenerator
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.judge.errors import JudgingFailed
from slipstream.rollout.messages import Evaluated, Question
from slipstream.rollout.trajectory import Completion
from slipstream.rollout.workflow import WorkflowContext


class GreedyGenerator:
    """The engines as a workflow sees them during evaluation."""

    def __init__(self, engines: GrowingGenerator) -> None:
        self._engines = engines

    async def generate(self, input_ids: Sequence[int], sampling: SamplingConfig) -> Completion:
        completion = GrowingCompletion()
        await self._engines.generate(input_ids, sampling, completion, greedy=True)
        return completion.completion()


class Evaluations:
    """Runs the evaluation episodes that the driver asks for. Single event loop."""

    def __init__(self, outbox: Outbox, context: WorkflowContext, episodes: Episodes, judge: Judge) -> None:
        """``context``: what a workflow may use in an evaluation."""
        self._outbox = outbox
        self._context = context
        self._episodes = episodes
        self._judge = judge
        self._running: dict[int, asyncio.Task[None]] = {}

    def start(self, question: Question) -> None:
        task = self._running[question.task] = asyncio.create_task(self._run(question))
        task.add_done_callback(lambda _: self._running.pop(question.task))

    def withdraw(self, task: int) -> None:
        """Give up an evaluation episode."""
        if task in self._running:
            self._running[task].cancel()

    async def close(self) -> None:
        """Give up everything."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, question: Question) -> None:
        prompt = as_prompt(question.prompt)
        try:
            trajectory = await self._episodes.run(prompt, self._context)
            reward = trajectory.reward
            if reward is None:
                reward = await self._judge(prompt, trajectory)
        except (EpisodeFailed, JudgingFailed) as error:
            result = Evaluated(question.task, None, 0, str(error))
        else:
            result = Evaluated(question.task, reward, trajectory.header.response_length, "")
        self._outbox.evaluated(result)
