"""One group, from its slot to ready, filtered or failed.

assignment ──► n episodes side by side ──► filter ──► gate.finished | gate.filtered | gate.failed
                  │            ▲
                  ▼            └── finished before a restart: taken from the ledger as they are
               journal: every completion while it grows, every trajectory once it is judged
"""

import asyncio
from dataclasses import dataclass, replace
from functools import partial

from slipstream.rollout.collect.episodes import EpisodeFailed, Episodes
from slipstream.rollout.collect.gate import AdmissionGate
from slipstream.rollout.collect.generator import ContinuingGenerator, JournaledGenerator
from slipstream.rollout.collect.intake import Assignment
from slipstream.rollout.collect.journal import Journal
from slipstream.rollout.collect.judging import GroupJudging
from slipstream.rollout.control.filters import GroupFilter
from slipstream.rollout.trajectory import Group, Trajectory
from slipstream.rollout.workflow import WorkflowContext


@dataclass(frozen=True)
class NamedFilter:
    """The recipe's group filter, and the import path that errors name it by."""

    path: str
    filter: GroupFilter

    def keep(self, group: Group) -> bool:
        """Return whether the group is to be trained. Whatever the filter raises becomes EpisodeFailed."""
        try:
            return self.filter.keep(group)
        except Exception as error:  # user code
            reason = f"prompt {group.prompt.id}: {self.path}: {type(error).__name__}: {error}"
            raise EpisodeFailed(reason) from error


class GroupCollector:
    """Collects groups. Single event loop; any number of groups at once."""

    def __init__(
        self,
        *,
        gate: AdmissionGate,
        journal: Journal,
        engines: ContinuingGenerator,
        context: WorkflowContext,
        episodes: Episodes,
        samples: int,
        group_filter: NamedFilter | None,
    ) -> None:
        """``context``: what every episode may use; each gets a generator and a reward of its own in it.

        ``samples``: episodes of a group, ``rollout.n_samples_per_prompt``.
        """
        self._gate = gate
        self._journal = journal
        self._engines = engines
        self._context = context
        self._episodes = episodes
        self._samples = samples
        self._filter = group_filter

    async def collect(self, assignment: Assignment) -> None:
        """Collect one group and tell the gate how it has ended."""
        ticket = assignment.ticket
        judged = assignment.prior.trajectories if assignment.prior else {}
        generating = set(range(self._samples)).difference(judged)
        judging = GroupJudging(self._context.reward, generating, partial(self._gate.judging, ticket))
        tasks: list[asyncio.Task[Trajectory]] = []
        self._gate.generating(ticket)
        try:
            async with asyncio.TaskGroup() as episodes:
                for number in range(self._samples):
                    tasks.append(episodes.create_task(self._trajectory(assignment, number, judging)))
            trajectories = tuple(task.result() for task in tasks)
            group = Group(ticket.id, assignment.prompt, ticket.version, trajectories)
            keep = self._filter is None or self._filter.keep(group)
        except* EpisodeFailed as failures:
            finished = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
            self._gate.failed(ticket, str(failures.exceptions[0]), finished)
        else:
            if keep:
                await self._gate.finished(group)
            else:
                self._gate.filtered(group)

    async def _trajectory(self, assignment: Assignment, number: int, judging: GroupJudging) -> Trajectory:
        """Return trajectory ``number`` of the group: of before a restart, or of an episode that runs now."""
        id_, prior = assignment.ticket.id, assignment.prior
        if prior is not None and number in prior.trajectories:
            return prior.trajectories[number]
        partials = prior.partials.get(number, {}) if prior is not None else {}
        is_wanted = partial(self._gate.is_open, id_)
        generator = JournaledGenerator(self._engines, self._journal, id_, number, partials, is_wanted)
        context = replace(self._context, generator=generator, reward=judging.of_episode(number))
        trajectory = await self._episodes.run(assignment.prompt, context)
        self._journal.trajectory(id_, number, trajectory)
        return trajectory
