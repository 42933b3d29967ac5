"""Evaluation episodes: completions of held-out prompts. None is recorded in the ledger or trained."""

import asyncio
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.collection.collector.episodes import EpisodeFailed, Episodes, blame
from slipstream.rollout.collection.collector.groups import wait_for_end
from slipstream.rollout.collection.collector.outbox import Outbox
from slipstream.rollout.collection.collector.recording import GrowingGenerator
from slipstream.rollout.collection.collector.untrained_log import UntrainedLog
from slipstream.rollout.collection.messages import Question
from slipstream.rollout.compat.hooks import EvaluateSets
from slipstream.rollout.engine.engine_pool import NoEngine
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.sampling import LiveSampling
from slipstream.rollout.reward.judge.judge_errors import JudgeStartFailed, JudgingFailed
from slipstream.rollout.reward.value import EpisodeJudge
from slipstream.rollout.tokens.trajectory import Completion, Trajectory
from slipstream.rollout.workflow import WorkflowContext
from slipstream.rollout.workflow.numbers import EpisodeNumbers


class UnrecordedGenerator:
    """The engines without a record of their completions, for evaluations and callers that keep their own."""

    def __init__(self, engines: GrowingGenerator, *, greedy: bool) -> None:
        """``greedy``: sample the likeliest tokens, whatever temperature a client asks for."""
        self._engines = engines
        self._greedy = greedy

    async def generate(self, input_ids: Sequence[int], sampling: SamplingConfig) -> Completion:
        completion = GrowingCompletion()
        await self._engines.generate(input_ids, sampling, completion, greedy=self._greedy)
        return completion.completion()

    async def extend(
        self,
        input_ids: Sequence[int],
        sampling: LiveSampling,
        completion: GrowingCompletion,
        *,
        grown: Callable[[], None] | None = None,
    ) -> None:
        """Continue the completion of a client's request."""
        await self._engines.generate(input_ids, sampling, completion, greedy=self._greedy, grown=grown)


class _EvaluationEpisode:
    """One evaluation episode, as ``EpisodeHost``."""

    def __init__(self, context: WorkflowContext) -> None:
        self._context = context
        self.is_given_up = False

    def begin(self, attempt: int) -> WorkflowContext:
        return replace(self._context, numbers=EpisodeNumbers())

    def accept(self, trajectory: Trajectory) -> None:
        """Accept everything: it is not trained."""


class Evaluations:
    """Runs the evaluation episodes that the driver asks for. Single event loop."""

    def __init__(
        self,
        outbox: Outbox,
        context: WorkflowContext,
        episodes: Episodes,
        judge: EpisodeJudge,
        function: EvaluateSets | None = None,
        log: UntrainedLog | None = None,
    ) -> None:
        """``context``: what a workflow may use in an evaluation. ``function``: evaluates whole sets. ``log``:
        None if the recipe asks for no episode log.
        """
        self._outbox = outbox
        self._context = context
        self._episodes = episodes
        self._judge = judge
        self._function = function
        self._log = log
        self._running: dict[int, tuple[_EvaluationEpisode, asyncio.Task[None]]] = {}

    def start(self, question: Question) -> None:
        episode = _EvaluationEpisode(self._context)
        task = asyncio.create_task(self._run(question, episode), name=f"evaluation {question.task}")
        self._running[question.task] = episode, task
        task.add_done_callback(lambda task: self._ended(question, episode, task))

    def withdraw(self, number: int) -> None:
        """Give up an evaluation episode."""
        if number in self._running:
            episode, task = self._running[number]
            episode.is_given_up = True
            task.cancel()

    async def close(self) -> None:
        """Give up everything. Returns after a bounded time."""
        tasks = [task for _, task in self._running.values()]
        for number in list(self._running):
            self.withdraw(number)
        await wait_for_end(tasks)

    async def _run(self, question: Question, episode: _EvaluationEpisode) -> None:
        if question.prompt is None:
            await self._evaluate_sets(question)
            return
        prompt = question.prompt
        trajectory: Trajectory | None = None
        try:
            trajectory = await self._episodes.run(prompt, episode)
            if trajectory.reward is None:
                judgement = await self._judge.judge(prompt, trajectory)
                trajectory = trajectory.judged(judgement.reward, judgement.parts)
        except EpisodeFailed as error:
            self._failed(question, str(error), trajectory)
        except JudgingFailed as error:
            self._failed(question, f"{prompt.reference}: {error}", trajectory)
        else:
            if self._log is not None:
                self._log.evaluated(question, prompt, trajectory)
            self._outbox.evaluated(question.task, trajectory.header)

    async def _evaluate_sets(self, question: Question) -> None:
        if self._function is None:
            self._failed(question, "the recipe has no function that evaluates")
            return
        try:
            sets, metrics = await self._function(question.version)
        except (NoEngine, asyncio.CancelledError):
            raise
        except Exception as error:  # user code
            self._failed(question, blame(self._named(question), error))
        else:
            self._outbox.evaluated_sets(question.task, sets, metrics)

    def _ended(self, question: Question, episode: _EvaluationEpisode, task: asyncio.Task[None]) -> None:
        """See to it that the driver hears of every question that it has not withdrawn."""
        del self._running[question.task]
        error = None if task.cancelled() else task.exception()
        if episode.is_given_up:
            return
        if task.cancelled():
            self._failed(question, f"{self._named(question)} has cancelled itself")
        elif isinstance(error, NoEngine | JudgeStartFailed):
            self._outbox.cannot_go_on(str(error))
        elif error is not None:
            trace = "".join(traceback.format_exception(error))
            self._failed(question, f"{self._named(question)}: {trace}")

    def _named(self, question: Question) -> str:
        """Return what failed: the function that evaluates whole sets, or the workflow and its prompt."""
        if question.prompt is None:
            return "the function that evaluates (rollout.hooks)"
        return f"{question.prompt.reference}: {self._episodes.name}"

    def _failed(self, question: Question, note: str, trajectory: Trajectory | None = None) -> None:
        if question.prompt is not None and self._log is not None:
            self._log.evaluated(question, question.prompt, trajectory, note)
        self._outbox.evaluation_failed(question.task, note)
