"""The control core for coroutines: waits for slots and batches, and every event written down."""

import asyncio
from collections.abc import Callable, Sequence

from slipstream.rollout.changes import Changes
from slipstream.rollout.collect.intake import Assignment, Intake
from slipstream.rollout.collect.journal import Journal
from slipstream.rollout.control.core import Expired, GroupCounts, Loss, RolloutControl, Ticket
from slipstream.rollout.control.slots import State
from slipstream.rollout.trajectory import Group, Trajectory

LEAST_FAILURES = 8
"""Failures in a row that are always borne: with few slots, one bad prompt must not end the run."""


class StalledRun(RuntimeError):
    """Nothing can be trained: the batch did not come, or group after group fails."""


class AdmissionGate:
    """Waits for slots and batches. All users run on one event loop.

    A wait that is cancelled or timed out has taken neither a slot nor a batch. The other events never
    suspend, but for ``finished`` and ``step_begins``, which return when the journal is safe: what is
    trained can be trained again after a crash.
    """

    def __init__(
        self,
        core: RolloutControl,
        intake: Intake,
        journal: Journal,
        on_lost: Callable[[Loss, Sequence[Trajectory]], None],
    ) -> None:
        """``on_lost`` is told of every group that ends untrained, with what was generated for it."""
        self._core = core
        self._intake = intake
        self._journal = journal
        self._on_lost = on_lost
        self._changes = Changes()
        self._batch: list[Group] = []
        self._is_ended = False
        self._failures_in_a_row = 0
        self._last_failure = ""
        self.abandon: Callable[[int], None] = lambda id_: None
        """Called with every group that has expired: work on it is to be cancelled."""

    @property
    def version(self) -> int:
        return self._core.version

    @property
    def step(self) -> int:
        """Training steps done."""
        return self._core.step

    @property
    def counts(self) -> GroupCounts:
        return self._core.counts

    @property
    def losses(self) -> dict[Loss, int]:
        return self._core.losses

    @property
    def ready(self) -> int:
        return self._core.ready

    def in_state(self, state: State) -> int:
        """Groups that are there now."""
        return self._core.states[state]

    def is_open(self, id_: int) -> bool:
        """Whether work on the group is wanted: False once it has ended, be it because it has expired."""
        return self._core.is_open(id_)

    @property
    def position(self) -> int:
        """Prompts drawn from the prompt set so far."""
        return self._intake.position

    # ---- collection

    async def slot(self) -> Assignment:
        """Wait until a group may start. Waits as long as the trainer holds all slots."""
        if self._intake.resumed:
            return self._intake.resumed.popleft()
        ticket = await self._changes.first(lambda: self._core.admit() if self._core.may_admit() else None)
        assignment, position = self._intake.assign(ticket)
        self._journal.admitted(ticket, position)
        return assignment

    def generating(self, ticket: Ticket) -> None:
        self._core.generating(ticket.id)

    def judging(self, ticket: Ticket) -> None:
        if self._core.is_open(ticket.id):
            self._core.judging(ticket.id)

    async def finished(self, group: Group) -> None:
        """The group is complete and judged; its trajectories have been given to the journal."""
        self._journal.ready(group)
        await self._journal.flushed()
        self._failures_in_a_row = 0
        if self._core.is_open(group.id):
            self._core.finished(group)
            self._changes.notify()

    def filtered(self, group: Group) -> None:
        self._core.filtered(group.id)
        self._failures_in_a_row = 0
        self._lost(group.id, Loss.FILTERED, group.trajectories)

    def failed(self, ticket: Ticket, reason: str, trajectories: Sequence[Trajectory] = ()) -> None:
        """``trajectories``: those of the group that were finished."""
        self._core.failed(ticket.id)
        self._failures_in_a_row += 1
        self._last_failure = reason
        self._lost(ticket.id, Loss.FAILED, trajectories)

    # ---- training

    def end(self) -> None:
        """No further batch is taken."""
        self._is_ended = True
        self._changes.notify()

    async def batch(self, timeout_s: float) -> list[Group]:
        """Wait for the next batch; an empty one when the gate was ended.

        Raises StalledRun after ``timeout_s``, or when only failures come.
        """
        try:
            async with asyncio.timeout(timeout_s):
                self._batch = await self._changes.first(self._next_batch)
                return self._batch
        except TimeoutError:
            counts = self._core.counts
            raise StalledRun(
                f"no batch of {self._core.batch_size} groups within {timeout_s:.0f} s: "
                f"{counts.in_flight} in flight, {self._core.ready} ready, {counts.filtered} filtered, "
                f"{counts.failed} failed" + (f" ({self._last_failure})" if counts.failed else "")
            ) from None

    async def step_begins(self) -> None:
        """The batch is about to be trained: its version's number is taken from now on, come what may."""
        self._journal.step_begins(self._core.version + 1, self._core.step + 1)
        await self._journal.flushed()

    def published(self, version: int) -> None:
        """Every serving engine has the version that came of the batch."""
        self._core.published(version)
        self._journal.published(version, self._batch)
        for group in self._batch:
            self._intake.ended(group.id)
        self._batch = []
        self._settle_expired()
        self._changes.notify()

    def _next_batch(self) -> list[Group] | None:
        if self._is_ended:
            return []
        if self._failures_in_a_row >= max(self._core.capacity, LEAST_FAILURES):
            raise StalledRun(
                f"{self._failures_in_a_row} groups in a row have failed; the last one: {self._last_failure}"
            )
        batch = self._core.take_batch()
        if self._settle_expired():
            self._changes.notify()
        return batch

    def _settle_expired(self) -> list[Expired]:
        expired = self._core.take_expired()
        for one in expired:
            self.abandon(one.id)
            self._journal.expired(one)
            if one.loss is not Loss.REQUEUED:
                self._intake.ended(one.id)
            self._on_lost(one.loss, one.group.trajectories if one.group else ())
        return expired

    def _lost(self, id_: int, loss: Loss, trajectories: Sequence[Trajectory]) -> None:
        self._journal.lost(id_, loss, trajectories)
        self._intake.ended(id_)
        self._on_lost(loss, trajectories)
        self._changes.notify()
