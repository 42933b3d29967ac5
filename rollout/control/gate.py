"""The control core for coroutines: one condition guards all waits."""

import asyncio
from collections.abc import Callable

from rollout.control.core import GroupCounts, RolloutControl, Ticket
from rollout.trajectory import Group


class StalledRun(RuntimeError):
    """Nothing can be trained: the batch did not come, or group after group fails."""


class AdmissionGate:
    """Waits for slots and batches. All users run on one event loop; the core itself is never awaited."""

    def __init__(self, core: RolloutControl) -> None:
        self._core = core
        self._changed = asyncio.Condition()
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
        async with self._changed:
            await self._changed.wait_for(self._core.may_admit)
            return self._core.admit()

    async def finished(self, group: Group) -> None:
        self._failures_in_a_row = 0
        await self._event(lambda: self._core.finished(group))

    async def filtered(self, ticket: Ticket) -> None:
        self._failures_in_a_row = 0
        await self._event(lambda: self._core.filtered(ticket.id))

    async def failed(self, ticket: Ticket, reason: str) -> None:
        self._failures_in_a_row += 1
        self._last_failure = reason
        await self._event(lambda: self._core.failed(ticket.id))

    async def published(self, version: int) -> None:
        await self._event(lambda: self._core.published(version))

    async def batch(self, timeout_s: float) -> list[Group]:
        """Wait for the next batch. Raises StalledRun after ``timeout_s``, or when only failures come."""
        taken: list[list[Group]] = []

        def ready() -> bool:
            if self._failures_in_a_row >= self._core.capacity:
                raise StalledRun(
                    f"{self._failures_in_a_row} groups in a row have failed; the last one: {self._last_failure}"
                )
            batch = self._core.take_batch()
            if batch is not None:
                taken.append(batch)
            return batch is not None

        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(ready), timeout_s)
            except TimeoutError:
                counts = self._core.counts
                raise StalledRun(
                    f"no batch of {self._core.batch_size} groups within {timeout_s:.0f} s: {counts.in_flight} in "
                    f"flight, {self._core.ready} ready, {counts.filtered} filtered, {counts.failed} failed"
                ) from None
        return taken[0]

    async def _event(self, push: Callable[[], None]) -> None:
        async with self._changed:
            push()
            self._changed.notify_all()
