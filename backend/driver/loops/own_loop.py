"""A training loop that somebody else steers: from another thread, one verb after the other.

thread of the user           thread of the run
    call(verb) ──queue──► run ──► training_steps ──► what became of the step
        ◄──────────── future ─────────┘

waits for       the next command of the user
unblocked by    ``OwnLoop.call`` in the user's thread; ``OwnLoop.stop``
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.driver.loops.evaluation import Evaluation
from slipstream.backend.driver.loops.training import StepEvent, Steps
from slipstream.rollout.collection.driver.batches import Batches

Verb = Literal["go on", "evaluate", "end"]


@dataclass(frozen=True)
class OwnEvaluation:
    """The mean reward of the held-out prompts; None if they could not be evaluated."""

    reward: float | None


Answer = Future[StepEvent | OwnEvaluation | None]


@dataclass(frozen=True)
class _Command:
    verb: Verb
    batch: TrainBatch | None
    """Batch that is trained in place of the one that was taken; None: that one."""
    answer: Answer = field(default_factory=lambda: Future[StepEvent | OwnEvaluation | None]())


class OwnLoop:
    """The loop of one run. ``call`` and ``stop`` may be called from any thread, the others by the run."""

    def __init__(self) -> None:
        self.started: Future[Batches] = Future()
        """Done when engines and trainer are ready: the first step may begin."""
        self.total_steps = 0
        """Number of training steps of the run, which it knows before ``started``."""
        self._commands: asyncio.Queue[_Command] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ask: Callable[[], object] | None = None

    def call(self, verb: Verb, batch: TrainBatch | None = None) -> Answer:
        """Ask the loop, once it has ``started``. The answer never comes if the run ends before it."""
        assert self._loop is not None
        command = _Command(verb, batch)
        self._loop.call_soon_threadsafe(self._commands.put_nowait, command)
        return command.answer

    def stop(self) -> None:
        """End the run at once, wherever it is. It raises Stopped."""
        if self._loop is not None and self._ask is not None and not self._loop.is_closed():
            for _ in range(2):  # the first ends the run after the present step, the second at once
                self._loop.call_soon_threadsafe(self._ask)

    def can_be_stopped_by(self, ask: Callable[[], object]) -> None:
        """Begin: the run's event loop is running, and ``ask`` ends it."""
        self._loop, self._ask = asyncio.get_running_loop(), ask

    async def run(self, steps: Steps, batches: Batches, evaluation: Evaluation | None) -> None:
        """Do what is asked until that is the end."""
        if not self.started.done():
            self.started.set_result(batches)
        while not batches.is_ended:
            command = await self._commands.get()
            try:
                answer = await _answer(command, steps, batches, evaluation)
            except Exception as error:
                command.answer.set_exception(error)
                raise
            command.answer.set_result(answer)


async def _answer(
    command: _Command, steps: Steps, batches: Batches, evaluation: Evaluation | None
) -> StepEvent | OwnEvaluation | None:
    if command.verb == "evaluate":
        return OwnEvaluation(None if evaluation is None else await evaluation.run(batches.core.version))
    if command.verb == "end":
        batches.end()
        return None
    try:
        return await steps.asend(command.batch)
    except StopAsyncIteration:  # all steps are done
        return None
