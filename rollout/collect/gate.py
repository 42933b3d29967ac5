"""The control core for coroutines: waiting for slots and batches, and every event written down.

collection ──slot()──► ticket ──► finished | filtered | failed ──► core ──batch()──► training
              waits for a free slot                                       waits for a ready batch
training   ──step_begins(), published()──► core frees the slots, the waiting collection goes on
"""

import asyncio
from collections.abc import Sequence

from slipstream.rollout.changes import Changes
from slipstream.rollout.collect.intake import Assignment, Intake
from slipstream.rollout.collect.journal import Journal
from slipstream.rollout.collect.listener import CollectionListener
from slipstream.rollout.collect.running import RunningGroups
from slipstream.rollout.control.core import GroupCounts, Loss, RolloutControl, Ticket
from slipstream.rollout.control.slots import State
from slipstream.rollout.trajectory import Group, Trajectory

LEAST_FAILURES = 8
"""Number of failed groups in a row that never end a run: with few slots, one bad prompt must not end it."""


class StalledRun(RuntimeError):
    """Nothing can be trained: no batch came in time, or group after group fails."""


class AdmissionGate:
    """Waits for slots and batches. All users run on one event loop.

    A wait that is cancelled or timed out has taken neither a slot nor a batch. The other events return at
    once, except for ``finished`` and ``step_begins``: they return when the journal is on disk, because what
    is trained must be known after a crash.
    """

    def __init__(
        self,
        core: RolloutControl,
        intake: Intake,
        journal: Journal,
        listener: CollectionListener,
        running: RunningGroups,
    ) -> None:
        """``running`` holds the tasks of groups that are collected; those of expired groups are cancelled."""
        self._core = core
        self._intake = intake
        self._journal = journal
        self._listener = listener
        self._running = running
        self._changes = Changes()
        self._batch: list[Group] = []
        self._is_ended = False
        self._failures_in_a_row = 0
        self._last_failure = ""

    @property
    def version(self) -> int:
        """Policy version that every serving engine holds. The control core owns it."""
        return self._core.version

    @property
    def step(self) -> int:
        """Number of training steps done."""
        return self._core.step

    @property
    def counts(self) -> GroupCounts:
        return self._core.counts

    @property
    def losses(self) -> dict[Loss, int]:
        """Number of groups lost so far, by cause."""
        return self._core.losses

    @property
    def position(self) -> int:
        """Number of prompts drawn from the prompt set so far."""
        return self._intake.position

    @property
    def states(self) -> dict[State, int]:
        """Number of groups that have not ended, by state."""
        return dict(self._core.states)

    def is_open(self, id_: int) -> bool:
        """Return whether work on the group is still needed. An expired group is not open."""
        return self._core.is_open(id_)

    # ---- collection

    async def slot(self) -> Assignment:
        """Wait until a group may start. There is no time-out: slots are free as soon as the trainer steps."""
        if self._intake.resumed:
            return self._intake.resumed.popleft()
        ticket = await self._changes.first(lambda: self._core.admit() if self._core.may_admit() else None)
        assignment, position = self._intake.assign(ticket)
        self._journal.admitted(ticket, position)
        return assignment

    def generating(self, ticket: Ticket) -> None:
        """Note that the first completion of the group is requested."""
        self._core.generating(ticket.id)

    def judging(self, ticket: Ticket) -> None:
        """Note that the group waits for nothing but rewards."""
        if self._core.is_open(ticket.id):
            self._core.judging(ticket.id)

    async def finished(self, group: Group) -> None:
        """Take a complete and judged group whose trajectories are in the journal already."""
        self._journal.ready(group)
        await self._journal.flushed()
        self._failures_in_a_row = 0
        if self._core.is_open(group.id):
            self._core.finished(group)
            self._changes.notify()

    def filtered(self, group: Group) -> None:
        """Give up a complete group that the recipe's filter rejects."""
        self._core.filtered(group.id)
        self._failures_in_a_row = 0
        self._lost(group.id, Loss.FILTERED, group.trajectories)

    def failed(self, ticket: Ticket, reason: str, trajectories: Sequence[Trajectory] = ()) -> None:
        """Give up a group whose episodes failed; ``trajectories`` are its finished ones."""
        self._core.failed(ticket.id)
        self._failures_in_a_row += 1
        self._last_failure = reason
        self._lost(ticket.id, Loss.FAILED, trajectories)

    # ---- training

    def end(self) -> None:
        """Give out no further batch."""
        self._is_ended = True
        self._changes.notify()

    async def batch(self, timeout_s: float) -> list[Group]:
        """Wait for the next batch. It is empty once the gate was ended.

        Raises StalledRun after ``timeout_s``, or when group after group fails.
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
        """Write down that the batch is about to be trained: the number of the next version is taken now."""
        self._journal.step_begins(self._core.version + 1, self._core.step + 1)
        await self._journal.flushed()

    def published(self, version: int) -> None:
        """Move to ``version``, trained on the last batch: every engine in the pool holds it."""
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

    def _settle_expired(self) -> bool:
        """Write down and abandon the groups that have expired. Return whether there were any."""
        expired_groups = self._core.take_expired()
        for expired in expired_groups:
            self._running.abandon(expired.id)
            self._journal.expired(expired)
            if expired.loss is not Loss.REQUEUED:
                self._intake.ended(expired.id)
            self._listener.lost(expired.loss, expired.group.trajectories if expired.group else ())
        return bool(expired_groups)

    def _lost(self, id_: int, loss: Loss, trajectories: Sequence[Trajectory]) -> None:
        self._journal.lost(id_, loss, trajectories)
        self._intake.ended(id_)
        self._listener.lost(loss, trajectories)
        self._changes.notify()
