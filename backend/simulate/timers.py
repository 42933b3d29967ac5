"""Timers of a virtual clock."""

import heapq
from collections.abc import Callable
from typing import Any

SWEEP = 1024
"""Number of timers at which cancelled ones are removed first; later it is twice the number left over."""


class Call(list[Any]):
    """``[callback, arguments]``: a list, because unpacking it is faster than reading two attributes.

    It takes the place of ``asyncio.Handle`` and ``TimerHandle``, of which callers use nothing but ``cancel``.
    """

    __slots__ = ()

    def cancel(self) -> None:
        # Callback and arguments are released at once.
        self[:] = None, ()

    def cancelled(self) -> bool:
        return self[0] is None


class Timers:
    """Calls by time. Calls of the same time keep the order in which they were added."""

    def __init__(self) -> None:
        self._times: list[float] = []
        """Heap of plain numbers, which are compared fastest."""
        self._calls: dict[float, list[Call]] = {}
        """Calls by each of these times."""
        self._kept = 0
        self._sweep_at = SWEEP

    def __len__(self) -> int:
        """Return the number of timers. Cancelled timers count until they are swept out."""
        return sum(map(len, self._calls.values()))

    def add(self, when: float, callback: Callable[..., object], args: tuple[object, ...]) -> Call:
        """Set a timer for second ``when``."""
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
        """Remove the calls that are due next and return them with their time; None if there are none.

        At least one of the calls is not cancelled.
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
        """Remove cancelled timers."""
        live = (
            (when, [call for call in calls if call[0] is not None]) for when, calls in self._calls.items()
        )
        self._calls = {when: calls for when, calls in live if calls}
        self._times = sorted(self._calls)
        self._kept = len(self)
        self._sweep_at = max(SWEEP, 2 * self._kept)
