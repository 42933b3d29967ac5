"""The engines as one episode sees them: every completion is journaled, and survives a restart."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.collect.journal import Journal
from slipstream.rollout.ledger.database import LedgerError
from slipstream.rollout.ledger.records import digest
from slipstream.rollout.ledger.recovery import StoredCompletion
from slipstream.rollout.trajectory import Completion

JOURNAL_EVERY_S = 2.0
"""Longest time that tokens which an engine has handed out are kept in memory only."""


class ContinuingGenerator(Protocol):
    """A generator that can continue a partial completion and reports how it grows: the engine pool."""

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        prefix: Completion | None = None,
        progress: Callable[[Completion], None] | None = None,
    ) -> Completion: ...


class JournaledGenerator:
    """The generator of one episode. Its completions survive the end of this process, whole or partial.

    A workflow that runs again after a restart sends the same requests in the same order. A request that was
    complete before is answered from the journal at once, a partial one is continued. When a request differs
    from the journaled one (a tool gave another output), nothing that was journaled from there on is used.
    """

    __slots__ = ("_calls", "_clock", "_engines", "_group_id", "_is_wanted", "_journal", "_prior", "_sample")

    def __init__(
        self,
        engines: ContinuingGenerator,
        journal: Journal,
        group_id: int,
        sample: int,
        prior: Mapping[int, StoredCompletion],
        is_wanted: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``is_wanted``: whether the group is still open. A cancelled request is kept only then."""
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

        def write(completion: Completion, *, done: bool) -> None:
            self._journal.partial(self._group_id, self._sample, call, input_ids, completion, done=done)

        def progress(partial: Completion) -> None:
            nonlocal so_far, written, written_s
            so_far, now = partial, self._clock()
            new_version = written is None or len(partial.spans) != len(written.spans)
            if new_version or now - written_s >= JOURNAL_EVERY_S:
                written, written_s = partial, now
                write(partial, done=False)

        try:
            completion = await self._engines.generate(input_ids, sampling, prefix=so_far, progress=progress)
        except asyncio.CancelledError:
            if so_far is not None and so_far is not written and self._is_wanted():
                with suppress(LedgerError):  # then the run ends for that reason
                    write(so_far, done=False)
            raise
        write(completion, done=True)
        return completion
