"""What one episode may use: engines whose answers are journaled, and a reward that is seen to be asked."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from configs.schema import SamplingConfig
from rollout.control.journal import Journal
from rollout.ledger.records import digest
from rollout.ledger.recovery import PartialAnswer
from rollout.reward import Reward
from rollout.trajectory import Completion, Prompt, Trajectory

JOURNAL_EVERY_S = 2.0
"""Longest time that tokens which an engine has handed out are kept in memory only."""


class Continuing(Protocol):
    """``rollout.engine.pool.EnginePool``."""

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        prefix: Completion | None = None,
        progress: Callable[[Completion], None] | None = None,
    ) -> Completion: ...


class JournaledGenerator:
    """The engines, for one episode. Its answers survive the end of this process, complete or not.

    A workflow that is run again after a restart asks for the same things in the same order: what was answered
    before is answered at once, and what was answered in part is gone on with. If it asks for something else
    (a tool gave another output), nothing that was journaled from there on is used.
    """

    def __init__(
        self,
        engines: Continuing,
        journal: Journal,
        group_id: int,
        sample: int,
        prior: Mapping[int, PartialAnswer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._journal = journal
        self._group_id = group_id
        self._sample = sample
        self._prior = prior
        self._clock = clock
        self._calls = 0

    async def generate(self, input_ids: Sequence[int], sampling: SamplingConfig) -> Completion:
        call, self._calls = self._calls, self._calls + 1
        prior = self._prior.get(call)
        if prior is not None and prior.asked != digest(input_ids):
            self._prior, prior = {}, None
        if prior is not None and prior.done:
            return prior.answer
        versions, written_s = 0, self._clock()

        def progress(answer: Completion) -> None:
            nonlocal versions, written_s
            now = self._clock()
            if len(answer.spans) != versions or now - written_s >= JOURNAL_EVERY_S:
                versions, written_s = len(answer.spans), now
                self._journal.partial(self._group_id, self._sample, call, input_ids, answer, done=False)

        prefix = prior.answer if prior is not None else None
        answer = await self._engines.generate(input_ids, sampling, prefix=prefix, progress=progress)
        self._journal.partial(self._group_id, self._sample, call, input_ids, answer, done=True)
        return answer


class WatchedReward:
    """The reward, for the episodes of one group; ``on_asked`` is called with each question."""

    def __init__(self, reward: Reward, on_asked: Callable[[], None]) -> None:
        self._reward = reward
        self._on_asked = on_asked

    def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> Awaitable[float]:
        self._on_asked()
        return self._reward.score(prompt, response, trajectory)
