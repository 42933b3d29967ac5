"""An event loop whose clock jumps: code written for asyncio runs in virtual time, without waiting or I/O.

When nothing can run, the clock jumps to the next timer. Nothing reads the time of day, and timers of the same
time fire in the order in which they were set, so that a program always does the same thing.
"""

import asyncio
import gc
import heapq
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from types import CoroutineType
from typing import Any, TypeVar

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


T = TypeVar("T")

SHOWN = 8
"""Number of kinds of waiting coroutines that the report of a deadlock names."""


class Deadlock(RuntimeError):
    """Coroutines wait although nothing can run and no timer is set."""


def run(main: Coroutine[object, None, T], on_advance: Callable[[float], None] | None = None) -> T:
    """Do what ``asyncio.run`` does, in virtual time from second 0. ``on_advance``: see ``VirtualLoop``.

    The garbage collector is off meanwhile: a simulation makes hardly any cyclic garbage, and the collector
    would walk through a hundred thousand live coroutines again and again.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(on_advance)) as runner:
            return runner.run(main)
    finally:
        if collects:
            gc.enable()


class VirtualLoop(asyncio.BaseEventLoop):
    """Supports ``asyncio.sleep``, ``timeout``, ``TaskGroup`` and so on, but neither sockets nor threads.

    An exception of a callback ends the loop: in a simulation it is a bug.
    """

    # Attributes of asyncio's own loop, which its type stubs leave out.
    _ready: deque[Call]
    _stopping: bool

    def __init__(self, on_advance: Callable[[float], None] | None = None) -> None:
        """``on_advance`` is called with each new time, before the clock shows it and anything happens."""
        super().__init__()
        self._now = 0.0
        self._on_advance = on_advance
        self._timers = Timers()

    # Every future asks for the debug mode, and ``bool()`` is the fastest way to say no.
    get_debug = staticmethod(bool)  # pyright: ignore[reportAssignmentType]

    def time(self) -> float:
        return self._now

    # Contexts are ignored: a simulation has no context variables, and switching between contexts takes time.

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> Call:
        call = Call((callback, args))
        self._ready.append(call)
        return call

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> Call:
        return self._timers.add(when, callback, args)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> Call:
        return self._timers.add(self._now + delay, callback, args)

    def create_task(
        self, coro: Coroutine[object, None, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=name)

    # asyncio itself calls the methods below.

    def _write_to_self(self) -> None:
        """Do nothing: asyncio calls this at Ctrl-C to wake a loop that waits, and this loop never waits."""

    def _run_once(self) -> None:
        """Run until the loop is stopped, where asyncio's loop would return after every round of callbacks."""
        ready = self._ready
        while not self._stopping:
            if not ready:
                self._advance()
            for _ in range(len(ready)):
                callback, args = ready.popleft()
                if callback is not None:
                    callback(*args)

    def _advance(self) -> None:
        """Jump to the next timer, and make the calls of that time ready."""
        due = self._timers.take()
        if due is None:
            raise Deadlock(f"at {self._now:.3f} s nothing can run and no timer is set; {waiting(self)}")
        when, calls = due
        if when > self._now:
            if self._on_advance is not None:
                self._on_advance(when)
            self._now = when
        self._ready.extend(calls)


def waiting(loop: asyncio.AbstractEventLoop) -> str:
    """Return a message that says which tasks wait in which call."""
    chains = Counter(_chain(task.get_coro()) for task in asyncio.all_tasks(loop))
    shown = [f"{number} x {chain}" for chain, number in sorted(chains.items())[:SHOWN]]
    more = f" and {len(chains) - SHOWN} other kinds" if len(chains) > SHOWN else ""
    return f"{chains.total()} tasks wait: " + "; ".join(shown) + more


def _chain(awaited: object) -> str:
    """Return the calls of a coroutine, from the outermost to the one that waits."""
    names = []
    while isinstance(awaited, CoroutineType):
        names.append(awaited.__qualname__)
        awaited = awaited.cr_await
    return " > ".join(names)
