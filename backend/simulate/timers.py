"""The timers of a virtual clock, of which there may be a hundred thousand, most of them never to fire."""

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Any

LANES = 2
"""One for the time-outs of episodes, one for those of whatever waits longer at the same time."""

SWEEP = 1024
"""Timers that are kept before the cancelled ones are swept out; from then on, twice as many as were left."""


class Call(list[Any]):
    """``[callback, arguments, time, order of asking]``, to be unpacked without a detour.

    What ``asyncio.Handle`` and ``TimerHandle`` are to asyncio's own loops, which do nothing with them but
    cancel them.
    """

    __slots__ = ()

    def cancel(self) -> None:
        # What they hold on to is not needed any more.
        self[:2] = None, ()

    def cancelled(self) -> bool:
        return self[0] is None


class Timers:
    """Calls by time; those of one time in the order in which they were added.

    Times are in a heap. Before it there are a few *lanes*: queues in order of time, to which a timer is
    appended if it is not earlier than all of a lane. Time-outs of one length never are, and those are nearly
    all timers there ever are: every episode sets one and cancels it when it has ended. So the heap stays as
    small as the number of engines.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        """Heap, of plain numbers because they are compared fastest."""
        self._calls: dict[float, list[Call]] = {}
        """By each of these times, in the order of asking."""
        self._lanes: list[deque[Call]] = [deque() for _ in range(LANES)]
        self._lanes_at = math.inf
        """No timer of a lane is due before this."""
        self._lanes_to = -math.inf
        """No lane takes a timer that is due before this."""
        self._order = 0
        self._kept = 0
        self._sweep_at = SWEEP

    def __len__(self) -> int:
        """Cancelled ones count until they are swept out."""
        return sum(map(len, self._calls.values())) + sum(map(len, self._lanes))

    def add(self, when: float, callback: Callable[..., object], args: tuple[Any, ...]) -> Call:
        self._order = order = self._order + 1
        call = Call((callback, args, when, order))
        self._kept += 1
        if self._kept > self._sweep_at:
            self._sweep()
        if when >= self._lanes_to:
            lane = next(lane for lane in self._lanes if not lane or lane[-1][2] <= when)
            lane.append(call)
            self._lanes_at = min(self._lanes_at, when)
            self._see_lanes()
            return call
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
        while times and times[0] < self._lanes_at:
            when = heapq.heappop(times)
            due = self._calls.pop(when)
            if due[0][0] is not None or any(call[0] is not None for call in due):
                return when, due
        return self._take_with_lanes()

    def _take_with_lanes(self) -> tuple[float, list[Call]] | None:
        for lane in self._lanes:
            while lane and lane[0][0] is None:
                lane.popleft()
        heads = [lane[0][2] for lane in self._lanes if lane] + self._times[:1]
        if not heads:
            self._lanes_at, self._lanes_to = math.inf, -math.inf
            return None
        when, due = min(heads), []
        if self._times and self._times[0] == when:
            due = self._calls.pop(heapq.heappop(self._times))
        for lane in self._lanes:
            while lane and lane[0][2] == when:
                due.append(lane.popleft())
        self._lanes_at = min((lane[0][2] for lane in self._lanes if lane), default=math.inf)
        self._see_lanes()
        if all(call[0] is None for call in due):
            return self.take()
        return when, sorted(due, key=_order)

    def _sweep(self) -> None:
        """Leave out what was cancelled, and what has been taken out of the count."""
        live = (
            (when, [call for call in calls if call[0] is not None]) for when, calls in self._calls.items()
        )
        self._calls = {when: calls for when, calls in live if calls}
        self._times = sorted(self._calls)
        self._lanes = [deque(call for call in lane if call[0] is not None) for lane in self._lanes]
        self._see_lanes()
        self._kept = len(self)
        self._sweep_at = max(SWEEP, 2 * self._kept)

    def _see_lanes(self) -> None:
        self._lanes_to = min(lane[-1][2] if lane else -math.inf for lane in self._lanes)


def _order(call: Call) -> int:
    return call[3]
