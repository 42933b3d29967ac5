"""Evaluation episodes on the collectors: asked once each, and once more when a collector is gone.

prompts ──► one question each, to the collectors in turn ──► results
"""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Protocol

from slipstream.rollout.collection.messages import Evaluated, Question
from slipstream.rollout.tokens.trajectory import Prompt


class Asking(Protocol):
    """The way to one collector. Messages are sent soon, in order."""

    def ask(self, question: Question) -> None: ...
    def withdraw(self, task: int) -> None: ...
    def evaluates_from(self, step: int) -> None: ...


class _Open:
    __slots__ = ("collector", "question", "result")

    def __init__(self, question: Question, result: asyncio.Future[Evaluated]) -> None:
        self.question = question
        self.result = result
        self.collector = ""
        """Collector that works on the question; empty: none does."""


class EvaluationTasks:
    """All evaluation episodes that have not ended. Single event loop."""

    def __init__(self) -> None:
        self._evaluates_from: int | None = None
        self._open: dict[int, _Open] = {}
        self._collectors: dict[str, Asking] = {}
        self._numbers = itertools.count()
        self._turns = itertools.count()

    def evaluates_from(self, step: int) -> None:
        """Let collectors know that evaluations of this training step and of later ones are still to come."""
        self._evaluates_from = step
        for collector in self._collectors.values():
            collector.evaluates_from(step)

    async def ask(
        self, prompts: Sequence[Prompt], version: int = 0, step: int = 0, samples: int = 1
    ) -> list[Evaluated]:
        """Run ``samples`` episodes for each prompt. Return the results in the order of the prompts, those of
        a prompt in a row.

        ``version``: policy version of the trainer. ``step``: number of training steps that led to it. Waits
        for a collector if there is none. A caller that is cancelled withdraws its questions.
        """
        self._begins(step)
        return await self._ask(
            [
                Question(next(self._numbers), prompt, version, step, sample)
                for prompt in prompts
                for sample in range(samples)
            ]
        )

    async def ask_function(self, version: int) -> Evaluated:
        """Ask the recipe's function, in one collector, for a whole evaluation. Return its answer."""
        return (await self._ask([Question(next(self._numbers), None, version)]))[0]

    def _begins(self, step: int) -> None:
        """Note that the evaluation of a step is no longer to come, for collectors that join from now on."""
        if self._evaluates_from is not None:
            self._evaluates_from = max(self._evaluates_from, step + 1)

    async def _ask(self, questions: Sequence[Question]) -> list[Evaluated]:
        loop = asyncio.get_running_loop()
        asked = [_Open(question, loop.create_future()) for question in questions]
        self._open |= {each.question.task: each for each in asked}
        self._distribute()
        try:
            return list(await asyncio.gather(*(each.result for each in asked)))
        finally:
            for each in asked:
                if self._open.pop(each.question.task, None) is not None and each.collector:
                    self._collectors[each.collector].withdraw(each.question.task)

    def joined(self, name: str, collector: Asking) -> None:
        self._collectors[name] = collector
        if self._evaluates_from is not None:
            collector.evaluates_from(self._evaluates_from)
        self._distribute()

    def left(self, name: str) -> None:
        """Ask others what a collector that is gone has not answered."""
        self._collectors.pop(name, None)
        for each in self._open.values():
            if each.collector == name:
                each.collector = ""
        self._distribute()

    def answered(self, name: str, result: Evaluated) -> None:
        """Take a result. Late results of withdrawn questions are ignored."""
        each = self._open.get(result.task)
        if each is not None and each.collector == name:
            del self._open[result.task]
            if not each.result.done():  # the caller has been cancelled, but has not run yet
                each.result.set_result(result)

    def _distribute(self) -> None:
        names = list(self._collectors)
        for each in self._open.values():
            if names and not each.collector:
                each.collector = names[next(self._turns) % len(names)]
                self._collectors[each.collector].ask(each.question)
