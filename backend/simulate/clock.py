"""An event loop whose clock jumps: code written for asyncio runs in virtual time, without waiting or I/O.

When nothing can run, the clock jumps to the next timer. Nothing reads the time of day, and timers of the same
time fire in the order in which they were set, so that a program always does the same thing.
"""

import asyncio
import gc
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from types import CoroutineType
from typing import TypeVar

from slipstream.backend.simulate.timers import Call, Timers

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
