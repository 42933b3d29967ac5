"""One leased group, from its lease to its verdict.

lease ──► n episodes side by side ──► judging ──► filter ──► verdict: train | filtered | failed
               │  ▲                      │  ▲
               ▼  └── recorded before    ▼  └── answered before: only judged
            outbox: pieces            outbox: trajectories, rewards

An episode is recorded before it is judged, so that a judge that fails, or a process that ends, never costs a
completion. A group in which one episode has failed is lost: its other episodes are given up.
"""

import asyncio
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, cast

import msgspec

from slipstream.rollout.collector.episodes import EpisodeFailed, Episodes
from slipstream.rollout.collector.outbox import Outbox
from slipstream.rollout.collector.recording import GrowingGenerator, Recording
from slipstream.rollout.control.filters import GroupFilter
from slipstream.rollout.judge.pool import Judgement, JudgingFailed
from slipstream.rollout.messages import ANSWERED, FAILED, FILTERED, JUDGED, TRAIN, Lease, PriorSample
from slipstream.rollout.record import CorruptRecord, decode_header, decode_trajectory
from slipstream.rollout.trajectory import UNSAMPLED, Finish, Group, Messages, Prompt, Trajectory
from slipstream.rollout.workflow import Tokenizer, WorkflowContext


class Judges(Protocol):
    """Whoever asks the recipe's reward: ``rollout.judge.pool.JudgePool``."""

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> Judgement:
        """Raises JudgingFailed after the last attempt."""
        ...


@dataclass(frozen=True)
class NamedFilter:
    """The recipe's group filter, and the import path that errors name it by."""

    path: str
    filter: GroupFilter

    def keep(self, group: Group) -> bool:
        """Return whether the group is to be trained. Whatever the filter raises becomes EpisodeFailed."""
        try:
            return bool(self.filter.keep(group))
        except BaseException as error:  # user code
            reason = f"prompt {group.prompt.id}: {self.path}: {type(error).__name__}: {error}"
            raise EpisodeFailed(reason) from error


class WorkflowReward:
    """The recipe's reward as a workflow asks for it, in the middle of an episode."""

    def __init__(self, judges: Judges, stopped: Callable[[], object]) -> None:
        self._judges = judges
        self._stopped = stopped

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        """Return the reward. Raises JudgingFailed, which a workflow must let through."""
        self._stopped()
        return (await self._judges.score(prompt, response, trajectory)).reward


@dataclass(slots=True)
class _Running:
    task: asyncio.Task[None]
    recordings: list[Recording]
    is_wanted: bool = True


class GroupCollector:
    """Collects leased groups. Single event loop; any number of groups at once."""

    def __init__(
        self,
        *,
        engines: GrowingGenerator,
        outbox: Outbox,
        context: WorkflowContext,
        episodes: Episodes,
        judges: Judges,
        samples: int,
        group_filter: NamedFilter | None,
    ) -> None:
        """``context``: what every episode may use; each gets a generator and a reward of its own in it.

        ``samples``: episodes of a group, ``rollout.n_samples_per_prompt``.
        """
        self._engines = engines
        self._outbox = outbox
        self._context = context
        self._episodes = episodes
        self._judges = judges
        self._samples = samples
        self._filter = group_filter
        self._running: dict[tuple[int, int], _Running] = {}
        self.tokens_continued = 0
        """Number of tokens that another process had generated, and that were continued here."""

    def __len__(self) -> int:
        """Return the number of groups that have not ended."""
        return len(self._running)

    def start(self, lease: Lease, chunks: memoryview) -> None:
        """Start a group. ``chunks``: those of the lease's prior samples."""
        key = (lease.group, lease.lease)
        recordings = [
            Recording(self._engines, self._outbox, lease.group, lease.lease, sample)
            for sample in range(self._samples)
        ]
        task = asyncio.create_task(self._collect(lease, chunks, recordings))
        self._running[key] = _Running(task, recordings)
        task.add_done_callback(lambda task: self._ended(lease, task))

    def cancel(self, group: int, lease: int) -> None:
        """Give up a group that the driver needs no more."""
        if (running := self._running.get((group, lease))) is not None:
            running.is_wanted = False
            running.task.cancel()

    async def close(self) -> None:
        """Give up everything."""
        tasks = [running.task for running in self._running.values()]
        for key in list(self._running):
            self.cancel(*key)
        if tasks:
            await asyncio.wait(tasks)

    def write_ends(self, older_than_s: float) -> None:
        """Record completions that have ended while their episodes go on without the engines."""
        for running in self._running.values():
            for recording in running.recordings:
                recording.write_ends(older_than_s)

    def _ended(self, lease: Lease, task: asyncio.Task[None]) -> None:
        running = self._running.pop((lease.group, lease.lease))
        if task.cancelled():
            if running.is_wanted:
                self._failed(lease, f"prompt {lease.prompt[0]}: the workflow has cancelled itself")
        elif (error := task.exception()) is not None:
            self._failed(lease, "".join(traceback.format_exception(error))[-2000:])

    def _failed(self, lease: Lease, reason: str) -> None:
        self._outbox.ended(lease.group, lease.lease, FAILED, reason)

    # ---- one group

    async def _collect(self, lease: Lease, chunks: memoryview, recordings: list[Recording]) -> None:
        await self._outbox.room()
        prompt = as_prompt(lease.prompt)
        prior = dict(_slices(lease.prior, chunks))
        try:
            if self._samples == 1:
                trajectories = [await self._sample(prompt, recordings[0], prior.get(0))]
            else:
                trajectories = await self._all(prompt, recordings, prior)
            verdict = self._verdict(lease, prompt, trajectories)
        except EpisodeFailed as error:
            self._failed(lease, str(error))
        else:
            self._outbox.ended(lease.group, lease.lease, verdict)

    async def _all(
        self,
        prompt: Prompt,
        recordings: list[Recording],
        prior: dict[int, tuple[PriorSample, memoryview]],
    ) -> list[Trajectory]:
        """Run all episodes of a group side by side. Raises what the first failed episode has raised."""
        tasks = [
            asyncio.create_task(self._sample(prompt, recording, prior.get(sample)))
            for sample, recording in enumerate(recordings)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            unfinished = [task for task in tasks if not task.done()]
            for task in unfinished:
                task.cancel()
            if unfinished:
                await asyncio.wait(unfinished)

    def _verdict(self, lease: Lease, prompt: Prompt, trajectories: list[Trajectory]) -> int:
        if self._filter is None:
            return TRAIN
        group = Group(lease.group, prompt, lease.version, tuple(trajectories))
        return TRAIN if self._filter.keep(group) else FILTERED

    async def _sample(
        self, prompt: Prompt, recording: Recording, prior: tuple[PriorSample, memoryview] | None
    ) -> Trajectory:
        """Return a judged trajectory: generated, continued, only judged, or as it is."""
        if prior is not None and prior[0].kind in (ANSWERED, JUDGED):
            self._outbox.released()
            trajectory = _stored(*prior)
        else:
            trajectory = await self._generated(prompt, recording, prior)
        if trajectory.reward is None:
            trajectory = await self._judged(prompt, trajectory)
            recording.judged(trajectory)
        return trajectory

    async def _generated(
        self, prompt: Prompt, recording: Recording, prior: tuple[PriorSample, memoryview] | None
    ) -> Trajectory:
        """Return the trajectory of an episode that runs here. It has been sent to the driver."""
        try:
            if prior is not None:
                self._continue(recording, *prior)
            context = replace(
                self._context,
                generator=recording,
                reward=WorkflowReward(self._judges, recording.write_ends),
            )
            trajectory = await self._episodes.run(prompt, context, recording.again)
        finally:
            self._outbox.released()
        recording.answered(trajectory)
        return trajectory

    def _continue(self, recording: Recording, prior: PriorSample, chunks: memoryview) -> None:
        try:
            self.tokens_continued += recording.resume(prior, chunks)
        except CorruptRecord:  # the ledger has checked the bytes: a record of another version
            recording.again()

    async def _judged(self, prompt: Prompt, trajectory: Trajectory) -> Trajectory:
        response = last_response(self._context.tokenizer, trajectory)
        try:
            judgement = await self._judges.score(prompt, response, trajectory)
        except JudgingFailed as error:
            raise EpisodeFailed(f"prompt {prompt.id}: {error}") from error
        return replace(trajectory, reward=judgement.reward)


def last_response(tokenizer: Tokenizer, trajectory: Trajectory) -> str:
    """Return the text of the trajectory's last completion, without special tokens."""
    start = end = 0
    for run, (version, _, run_end) in enumerate(trajectory.header.runs):
        if version == UNSAMPLED:
            continue
        previous = trajectory.header.runs[run - 1] if run else (UNSAMPLED, False, 0)
        if previous[0] == UNSAMPLED:
            start = previous[2]
        end = run_end
    return tokenizer.decode(trajectory.tokens_T[start:end].tolist(), skip_special_tokens=True)


def as_prompt(fields: tuple[int, object, object, dict[str, object]]) -> Prompt:
    """Return the prompt that a message holds."""
    id_, prompt, label, metadata = fields
    return Prompt(id_, cast("str | Messages", prompt), label, metadata)


def _slices(prior: list[PriorSample], chunks: memoryview) -> Iterator[tuple[int, tuple[PriorSample, memoryview]]]:
    """Yield the number of each prior sample, with its own chunks."""
    start = 0
    for sample in prior:
        end = start + sum(size for size, _ in sample.pieces)
        yield sample.sample, (sample, chunks[start:end])
        start = end


def _stored(prior: PriorSample, chunks: memoryview) -> Trajectory:
    return decode_trajectory(chunks, decode_header(prior.header))
