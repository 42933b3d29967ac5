"""The control core for coroutines: waits for slots and batches."""

import asyncio

from rollout.changes import Changes
from rollout.control.core import GroupCounts, RolloutControl, Ticket
from rollout.trajectory import Group

LEAST_FAILURES = 8
"""Failures in a row that are always borne: with few slots, one bad prompt must not end the run."""


class StalledRun(RuntimeError):
    """Nothing can be trained: the batch did not come, or group after group fails."""


class AdmissionGate:
    """Waits for slots and batches. All users run on one event loop.

    The events (``finished`` to ``published``) never suspend: a task that is cancelled has reported its group
    or has not begun to. A wait that is cancelled or timed out has taken neither a slot nor a batch.
    """

    def __init__(self, core: RolloutControl) -> None:
        self._core = core
        self._changes = Changes()
        self._failures_in_a_row = 0
        self._last_failure = ""

    @property
    def version(self) -> int:
        return self._core.version

    @property
    def counts(self) -> GroupCounts:
        return self._core.counts

    @property
    def ready(self) -> int:
        return self._core.ready

    async def slot(self) -> Ticket:
        """Wait until a group may start. Waits as long as the trainer holds all slots."""
        return await self._changes.first(lambda: self._core.admit() if self._core.may_admit() else None)

    async def finished(self, group: Group) -> None:
        self._core.finished(group)
        self._failures_in_a_row = 0
        self._changes.notify()

    async def filtered(self, ticket: Ticket) -> None:
        self._core.filtered(ticket.id)
        self._failures_in_a_row = 0
        self._changes.notify()

    async def failed(self, ticket: Ticket, reason: str) -> None:
        self._core.failed(ticket.id)
        self._failures_in_a_row += 1
        self._last_failure = reason
        self._changes.notify()

    async def published(self, version: int) -> None:
        self._core.published(version)
        self._changes.notify()

    async def batch(self, timeout_s: float) -> list[Group]:
        """Wait for the next batch. Raises StalledRun after ``timeout_s``, or when only failures come."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._changes.first(self._next_batch)
        except TimeoutError:
            counts = self._core.counts
            raise StalledRun(
                f"no batch of {self._core.batch_size} groups within {timeout_s:.0f} s: "
                f"{counts.in_flight} in flight, {self._core.ready} ready, {counts.filtered} filtered, "
                f"{counts.failed} failed" + (f" ({self._last_failure})" if counts.failed else "")
            ) from None

    def _next_batch(self) -> list[Group] | None:
        if self._failures_in_a_row >= max(self._core.capacity, LEAST_FAILURES):
            raise StalledRun(
                f"{self._failures_in_a_row} groups in a row have failed; the last one: {self._last_failure}"
            )
        return self._core.take_batch()
