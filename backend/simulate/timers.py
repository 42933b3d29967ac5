"""The timers of a virtual clock."""

import heapq
from collections.abc import Callable
from typing import Any

SWEEP = 1024
"""Timers that are kept before the cancelled ones are swept out; from then on, twice as many as were left."""


class Call(list[Any]):
    """``[callback, arguments]``, to be unpacked without a detour.

    What ``asyncio.Handle`` and ``TimerHandle`` are to asyncio's own loops, which do nothing with them but
    cancel them.
    """

    __slots__ = ()

    def cancel(self) -> None:
        # What they hold on to is not needed any more.
        self[:] = None, ()

    def cancelled(self) -> bool:
        return self[0] is None


class Timers:
    """Calls by time; those of one time in the order in which they were added."""

    def __init__(self) -> None:
        self._times: list[float] = []
        """Heap, of plain numbers because they are compared fastest."""
        self._calls: dict[float, list[Call]] = {}
        """By each of these times, in the order of asking."""
        self._kept = 0
        self._sweep_at = SWEEP

    def __len__(self) -> int:
        """Cancelled ones count until they are swept out."""
        return sum(map(len, self._calls.values()))

    def add(self, when: float, callback: Callable[..., object], args: tuple[Any, ...]) -> Call:
        call = Call((callback, args))
        self._kept += 1
        if self._kept > self._sweep_at:
            self._sweep()
        calls = self._calls.get(when)
        if calls is None:
            self._calls[when] = [call]
            heapq.heappush(self._times, when)
        else:
            calls.append(call)
        return call

    def take(self) -> tuple[float, list[Call]] | None:
        """Remove the calls that are due next, and say when that is; None: there are none.

        At least one of them has not been cancelled.
        """
        times = self._times
        while times:
            when = heapq.heappop(times)
            due = self._calls.pop(when)
            self._kept -= len(due)
            if due[0][0] is not None or any(call[0] is not None for call in due):
                return when, due
        return None

    def _sweep(self) -> None:
        """Leave out what was cancelled."""
        live = (
            (when, [call for call in calls if call[0] is not None]) for when, calls in self._calls.items()
        )
        self._calls = {when: calls for when, calls in live if calls}
        self._times = sorted(self._calls)
        self._kept = len(self)
        self._sweep_at = max(SWEEP, 2 * self._kept)
