"""What one episode may use: engines whose answers are journaled, and a reward that is seen to be asked."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.collect.journal import Journal
from slipstream.rollout.ledger.database import LedgerError
from slipstream.rollout.ledger.records import digest
from slipstream.rollout.ledger.recovery import StoredCompletion
from slipstream.rollout.reward import Reward
from slipstream.rollout.trajectory import Completion, Prompt, Trajectory

JOURNAL_EVERY_S = 2.0
"""Longest time that tokens which an engine has handed out are kept in memory only."""


class Continuing(Protocol):
    """``slipstream.rollout.engine.pool.EnginePool``."""

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

    __slots__ = ("_calls", "_clock", "_engines", "_group_id", "_is_wanted", "_journal", "_prior", "_sample")

    def __init__(
        self,
        engines: Continuing,
        journal: Journal,
        group_id: int,
        sample: int,
        prior: Mapping[int, StoredCompletion],
        is_wanted: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``is_wanted``: whether the group is still to be completed when an answer is cancelled."""
        self._engines = engines
        self._journal = journal
        self._group_id = group_id
        self._sample = sample
        self._prior = prior
        self._is_wanted = is_wanted
        self._clock = clock
        self._calls = 0

    async def generate(self, input_ids: Sequence[int], sampling: SamplingConfig) -> Completion:
        call, self._calls = self._calls, self._calls + 1
        prior = self._prior.get(call)
        if prior is not None and prior.input_digest != digest(input_ids):
            self._prior, prior = {}, None
        if prior is not None and prior.done:
            return prior.completion
        so_far = written = prior.completion if prior is not None else None
        written_s = self._clock()

        def write(answer: Completion, *, done: bool) -> None:
            self._journal.partial(self._group_id, self._sample, call, input_ids, answer, done=done)

        def progress(answer: Completion) -> None:
            nonlocal so_far, written, written_s
            so_far, now = answer, self._clock()
            new_version = written is None or len(answer.spans) != len(written.spans)
            if new_version or now - written_s >= JOURNAL_EVERY_S:
                written, written_s = answer, now
                write(answer, done=False)

        try:
            answer = await self._engines.generate(input_ids, sampling, prefix=so_far, progress=progress)
        except asyncio.CancelledError:
            if so_far is not None and so_far is not written and self._is_wanted():
                with suppress(LedgerError):  # then the run ends for that reason
                    write(so_far, done=False)
            raise
        write(answer, done=True)
        return answer


class WatchedReward:
    """The reward, for one episode; ``on_asked`` is called with each question."""

    __slots__ = ("_on_asked", "_reward")

    def __init__(self, reward: Reward, on_asked: Callable[[], None]) -> None:
        self._reward = reward
        self._on_asked = on_asked

    def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> Awaitable[float]:
        self._on_asked()
        return self._reward.score(prompt, response, trajectory)
