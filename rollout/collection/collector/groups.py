"""One assigned group, from its assignment to its verdict.

assignment ──► n episodes side by side ──► judging ──► filter ──► verdict: train | filtered | failed
                    │  ▲                      │  ▲
                    ▼  └── recorded before    ▼  └── answered before: only judged
                 outbox: pieces            outbox: trajectories, rewards

An episode is recorded before it is judged, so that a judge that fails, or a process that ends, never costs a
completion. A group in which one episode has failed is lost: its other episodes are given up. A reward of
groups judges when all episodes have ended, every other reward judges each episode as soon as that has ended.

waits for       ``Outbox.room``, before a group starts
unblocked by    ``Outbox.run``, when the connection has taken most of what was sent
waits for       the workflow of each episode, and its engines (``Recording.generate``)
unblocked by    ``EnginePool.generate``; the time limit of episodes; ``cancel``, when the driver says so
waits for       ``EpisodeJudge.judge`` and ``judge_group``
unblocked by    ``JudgePool``: an answer, or the end of the last attempt
"""

import asyncio
import logging
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from slipstream.rollout.collection.collector.episodes import EpisodeFailed, Episodes, blame
from slipstream.rollout.collection.collector.outbox import Outbox
from slipstream.rollout.collection.messages import (
    ANSWERED,
    FAILED,
    FILTERED,
    JUDGED,
    TRAIN,
    Assignment,
    PriorSample,
)
from slipstream.rollout.control.filters import GroupChoice, GroupFilter
from slipstream.rollout.engine.engine_pool import NoEngine
from slipstream.rollout.reward.judge.judge_errors import JudgeStartFailed, JudgingFailed
from slipstream.rollout.reward.value import EpisodeJudge, Judgement
from slipstream.rollout.tokens.record import CorruptRecord, decode_header, decode_trajectory, encode_scores
from slipstream.rollout.tokens.teacher import NOTHING_NEEDED, TeacherNeeds
from slipstream.rollout.tokens.trajectory import Group, Prompt, Trajectory
from slipstream.rollout.workflow import EpisodePlace, Generator, GroupRejected, WorkflowContext

log = logging.getLogger(__name__)

TASK_NAME = "group "

CLOSE_TIMEOUT_S = 10.0
"""Seconds for tasks of user code to end when they are cancelled."""

_Prior = tuple[PriorSample, memoryview]
"""The recorded part of an episode, and its chunks."""


class EpisodeRecord(Generator, Protocol):
    """One attempt's way to the engines, and its record: ``recording.Recording``."""

    def resume(self, prior: PriorSample, chunks: memoryview) -> int: ...
    def write_ends(self, older_than_s: float = 0.0) -> None: ...
    def accept(self, trajectory: Trajectory) -> None: ...
    def close(self) -> None: ...
    def answered(self, trajectory: Trajectory) -> None: ...
    def judged(self, trajectory: Trajectory, scores: bytes = b"") -> None: ...


RecordT = TypeVar("RecordT", bound=EpisodeRecord)


class WholeGroups:
    """The choice of a group filter."""

    def __init__(self, group_filter: GroupFilter) -> None:
        self._filter = group_filter

    def choose(self, group: Group) -> Sequence[Trajectory] | None:
        return group.trajectories if self._filter.keep(group) else None


@dataclass(frozen=True)
class NamedFilter:
    """The recipe's group filter, and the name that errors give it."""

    path: str
    choice: GroupChoice

    def choose(self, group: Group) -> Sequence[Trajectory] | None:
        """Return what is trained of the group. Whatever the filter raises becomes EpisodeFailed."""
        try:
            return self.choice.choose(group)
        except BaseException as error:  # user code
            reason = blame(f"the group filter {self.path}", error)
            raise EpisodeFailed(f"{group.prompt.reference}: {reason}") from error


class _Running(Generic[RecordT]):
    """A group that is being collected here."""

    def __init__(self, assignment: Assignment, samples: int) -> None:
        self.assignment = assignment
        self.episodes: list[_Episode[RecordT]] = []
        self.is_wanted = True
        """The driver has not cancelled it."""
        self.is_over = False
        """The episodes of the group are not needed any more."""
        self.on_engines = samples
        """Episodes that are not done with the engines."""


class _Episode(Generic[RecordT]):
    """One episode of a group, as ``EpisodeHost``. Each attempt has a record of its own."""

    __slots__ = ("_context", "_group", "_make", "_place", "record")

    def __init__(
        self,
        group: _Running[RecordT],
        make: Callable[[int], RecordT],
        context: Callable[[RecordT, EpisodePlace], WorkflowContext],
        place: EpisodePlace,
    ) -> None:
        """``make``: makes the record of an attempt."""
        self._group = group
        self._make = make
        self._context = context
        self._place = place
        self.record = make(0)

    @property
    def is_given_up(self) -> bool:
        return self._group.is_over

    def begin(self, attempt: int) -> WorkflowContext:
        if attempt:
            self.renew(attempt)
        return self._context(self.record, self._place)

    def renew(self, attempt: int) -> None:
        """Give up what is recorded."""
        self.record.close()
        self.record = self._make(attempt)

    def accept(self, trajectory: Trajectory) -> None:
        self.record.accept(trajectory)


class GroupCollector(Generic[RecordT]):
    """Collects assigned groups. Single event loop; any number of groups at once."""

    def __init__(
        self,
        *,
        outbox: Outbox,
        record: Callable[[int, int, int, int], RecordT],
        context: Callable[[RecordT, EpisodePlace], WorkflowContext],
        episodes: Episodes,
        judge: EpisodeJudge,
        samples: int,
        group_filter: NamedFilter | None,
        needs: TeacherNeeds = NOTHING_NEEDED,
    ) -> None:
        """``record``: makes the record of an attempt at an episode, given its group, assignment and sample,
        and the number of the attempt. ``context``: returns what a workflow may use in that attempt, given its
        record and its place. ``samples``: episodes of a group. ``needs``: what the recipe needs of a teacher.
        """
        self._outbox = outbox
        self._record = record
        self._context = context
        self._episodes = episodes
        self._judge = judge
        self._samples = samples
        self._filter = group_filter
        self._needs = needs
        self._running: dict[tuple[int, int], tuple[_Running[RecordT], asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        """Return the number of groups that have not ended."""
        return len(self._running)

    def start(self, assignment: Assignment, chunks: memoryview) -> None:
        """Start a group. ``chunks``: those of the assignment's prior samples."""
        group = _Running[RecordT](assignment, self._samples)
        for sample in range(self._samples):
            make = partial(self._record, assignment.group, assignment.number, sample)
            place = EpisodePlace(assignment.group, sample, assignment.version)
            group.episodes.append(_Episode(group, make, self._context, place))
        task = asyncio.create_task(self._collect(group, chunks), name=task_name(assignment.group))
        self._running[assignment.group, assignment.number] = (group, task)
        task.add_done_callback(lambda task: self._ended(group, task))

    def cancel(self, group: int, assignment: int) -> None:
        """Give up a group that the driver needs no more here. What exists of it is recorded: the run may end,
        and another one go on with it.
        """
        if (group, assignment) in self._running:
            running, task = self._running[group, assignment]
            for episode in running.episodes:
                episode.record.write_ends()
            running.is_wanted, running.is_over = False, True
            task.cancel()

    async def close(self) -> None:
        """Give up everything. Returns after CLOSE_TIMEOUT_S at the latest."""
        tasks = [task for _, task in self._running.values()]
        for key in list(self._running):
            self.cancel(*key)
        await wait_for_end(tasks)

    def write_ends(self, older_than_s: float) -> None:
        """Record completions that have ended while their episodes go on without the engines."""
        for running, _ in self._running.values():
            for episode in running.episodes:
                episode.record.write_ends(older_than_s)

    def _ended(self, group: _Running[RecordT], task: asyncio.Task[None]) -> None:
        assignment = group.assignment
        del self._running[assignment.group, assignment.number]
        group.episodes.clear()  # they refer to their group: only a search for garbage would free them
        if group.on_engines:
            self._outbox.released(group.on_engines)
        if not group.is_wanted:
            return
        if task.cancelled():
            self._failed(
                assignment, f"{assignment.prompt.reference}: {self._episodes.name} has cancelled itself"
            )
        elif isinstance(error := task.exception(), NoEngine | JudgeStartFailed):
            self._outbox.cannot_go_on(str(error))
        elif error is not None:
            trace = "".join(traceback.format_exception(error))
            self._failed(assignment, f"{assignment.prompt.reference}: {self._episodes.name}: {trace}")

    def _released(self, group: _Running[RecordT]) -> None:
        """The engines are done with an episode of the group."""
        group.on_engines -= 1
        self._outbox.released()

    def _failed(self, assignment: Assignment, reason: str) -> None:
        self._outbox.ended(assignment.group, assignment.number, FAILED, reason)

    # ---- one group

    async def _collect(self, group: _Running[RecordT], chunks: memoryview) -> None:
        await self._outbox.room()
        assignment = group.assignment
        prompt, prior = assignment.prompt, dict(_slices(assignment.prior, chunks))
        try:
            if self._samples == 1:
                trajectories = [await self._sample(group, prompt, 0, prior.get(0))]
            else:
                trajectories = await self._all(group, prompt, prior)
            if any(trajectory.reward is None for trajectory in trajectories):
                trajectories = await self._judged_together(group, prompt, trajectories)
            for trajectory in trajectories:
                self._check_teacher(prompt, trajectory)
            verdict = self._verdict(group, prompt, trajectories)
        except EpisodeFailed as error:
            self._failed(assignment, str(error))
        except GroupRejected:
            self._outbox.ended(assignment.group, assignment.number, FILTERED)
        else:
            self._outbox.ended(assignment.group, assignment.number, verdict)

    async def _all(
        self, group: _Running[RecordT], prompt: Prompt, prior: dict[int, _Prior]
    ) -> list[Trajectory]:
        """Run all episodes of a group side by side. Raises what the first failed episode has raised."""
        name = task_name(group.assignment.group)
        tasks = [
            asyncio.create_task(self._sample(group, prompt, number, prior.get(number)), name=name)
            for number in range(self._samples)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        except (EpisodeFailed, GroupRejected):
            for episode in group.episodes:
                episode.record.write_ends()  # before the verdict: the episode log shows what there is
            raise
        finally:
            group.is_over = True
            await _cancelled([task for task in tasks if not task.done()])

    def _check_teacher(self, prompt: Prompt, trajectory: Trajectory) -> None:
        """Raise EpisodeFailed for a trajectory that lacks what its recipe needs of a teacher."""
        if self._needs == NOTHING_NEEDED:
            return
        if missing := self._needs.problem(trajectory.teacher, trajectory.loss_mask_T):
            raise EpisodeFailed(
                f"{prompt.reference}: neither {self._episodes.name} nor the reward has given {missing}"
            )

    def _verdict(self, running: _Running[RecordT], prompt: Prompt, trajectories: list[Trajectory]) -> int:
        if self._filter is None:
            return TRAIN
        assignment = running.assignment
        group = Group(assignment.group, prompt, assignment.version, tuple(trajectories))
        trained = self._filter.choose(group)
        if trained is None:
            return FILTERED
        for episode, before, after in zip(running.episodes, trajectories, trained, strict=True):
            if after is not before:
                episode.record.judged(after)
        return TRAIN

    async def _sample(
        self, group: _Running[RecordT], prompt: Prompt, number: int, prior: _Prior | None
    ) -> Trajectory:
        """Return a trajectory: generated, continued, only judged, or as it is. It has its reward, unless the
        group is judged as a whole.
        """
        episode = group.episodes[number]
        try:
            if prior is not None and prior[0].kind in (ANSWERED, JUDGED):
                trajectory = decode_trajectory(prior[1], decode_header(prior[0].header))
            else:
                trajectory = await self._generated(prompt, episode, prior)
        except (EpisodeFailed, GroupRejected):
            episode.record.write_ends()
            raise
        finally:
            episode.record.close()  # before anything else runs: nothing may follow on the trajectory
            self._released(group)
        if trajectory.reward is None and trajectory.is_dropped:
            trajectory = trajectory.judged(0.0)  # it is in no mean: nobody needs to be asked
            episode.record.judged(trajectory)
        if trajectory.reward is None and not self._judge.of_groups:
            judgement = await self._judgement(prompt, trajectory)
            trajectory = self._add_judgement(episode.record, prompt, trajectory, judgement)
        return trajectory

    async def _judged_together(
        self, group: _Running[RecordT], prompt: Prompt, trajectories: list[Trajectory]
    ) -> list[Trajectory]:
        """Return the trajectories of a group with their rewards. A reward that a workflow has set stays.

        All rewards go out together, so that a group is never judged in part.
        """
        try:
            judgements = await self._judge.judge_group(prompt, trajectories)
        except JudgingFailed as error:
            raise EpisodeFailed(f"{prompt.reference}: {error}") from error
        judged: list[Trajectory] = []
        for episode, trajectory, judgement in zip(group.episodes, trajectories, judgements, strict=True):
            if trajectory.reward is None:
                trajectory = self._add_judgement(episode.record, prompt, trajectory, judgement)
            judged.append(trajectory)
        return judged

    async def _generated(
        self, prompt: Prompt, episode: _Episode[RecordT], prior: _Prior | None
    ) -> Trajectory:
        """Return the trajectory of an episode that runs here. It has been sent to the driver."""
        if prior is not None:
            self._continue(episode, *prior)
        trajectory = await self._episodes.run(prompt, episode)
        episode.record.answered(trajectory)
        if trajectory.reward is not None:
            episode.record.judged(trajectory)
        return trajectory

    def _continue(self, episode: _Episode[RecordT], prior: PriorSample, chunks: memoryview) -> None:
        try:
            episode.record.resume(prior, chunks)
        except CorruptRecord:  # its bytes are those that were written: a record of another version
            episode.renew(0)

    async def _judgement(self, prompt: Prompt, trajectory: Trajectory) -> Judgement:
        try:
            return await self._judge.judge(prompt, trajectory)
        except JudgingFailed as error:
            raise EpisodeFailed(f"{prompt.reference}: {error}") from error

    def _add_judgement(
        self, record: EpisodeRecord, prompt: Prompt, trajectory: Trajectory, judgement: Judgement
    ) -> Trajectory:
        """Return the trajectory with its judgement, which is sent."""
        teacher, had_scores = judgement.teacher, trajectory.teacher is not None
        try:
            trajectory = trajectory.judged(judgement.reward, judgement.parts, teacher, judgement.turn_rewards)
            if teacher is not None:
                self._episodes.check(trajectory)
        except ValueError as error:
            raise EpisodeFailed(f"{prompt.reference}: the scores that its reward gave: {error}") from error
        record.judged(trajectory, b"" if teacher is None else encode_scores(teacher, replaces=had_scores))
        return trajectory


def _slices(prior: list[PriorSample], chunks: memoryview) -> Iterator[tuple[int, _Prior]]:
    """Yield the number of each prior sample, with its own chunks."""
    start = 0
    for sample in prior:
        end = start + sum(size for size, _ in sample.pieces)
        yield sample.sample, (sample, chunks[start:end])
        start = end


async def wait_for_end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Wait for tasks of user code that were cancelled, for CLOSE_TIMEOUT_S at the longest."""
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
        if left:
            names = ", ".join(task.get_name() for task in list(left)[:5])
            log.warning(
                "%d tasks do not end within %g s of their cancellation: %s", len(left), CLOSE_TIMEOUT_S, names
            )


async def _cancelled(tasks: Collection[asyncio.Task[Trajectory]]) -> None:
    """Cancel tasks, and wait for their ends, even if the waiting task is cancelled itself."""
    for task in tasks:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while left := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def task_name(group: int) -> str:
    """Return the name of the tasks that collect a group, by which the watchdog knows them."""
    return f"{TASK_NAME}{group}"
