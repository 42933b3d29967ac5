"""An event loop whose clock jumps: code written for asyncio runs in virtual time, without waiting or I/O.

When nothing can run, the clock is set to the next timer. Nothing reads the time of day, and timers that are
due at the same time fire in the order in which they were set, so that a program always does the same thing.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from slipstream.backend.simulate.timers import Call, Timers

T = TypeVar("T")

SHOWN = 8
"""Kinds of waiting coroutines that the report of a deadlock names."""


class Deadlock(RuntimeError):
    """Coroutines wait, and there is neither anything to run nor a timer to wait for."""


def run(main: Coroutine[Any, Any, T], on_advance: Callable[[float], None] | None = None) -> T:
    """``asyncio.run`` in virtual time, from second 0 on. ``on_advance``: see ``VirtualLoop``.

    Cyclic garbage is not looked for meanwhile: a simulation makes next to none, and its hundred thousand live
    coroutines would be walked through again and again.
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
    """``asyncio.sleep``, ``timeout``, ``TaskGroup`` and so on work as ever; sockets and threads do not.

    What a callback raises ends the loop: in a simulation it is a bug.
    """

    def __init__(self, on_advance: Callable[[float], None] | None = None) -> None:
        """``on_advance`` is called with each new time before the clock shows it and anything happens then."""
        super().__init__()
        self._now = 0.0
        self._on_advance = on_advance
        self._timers = Timers()

    get_debug = staticmethod(bool)
    """False. Every future asks, and this is the fastest way of saying so."""

    def time(self) -> float:
        return self._now

    # Contexts are not kept: nothing in a simulation has context variables, and switching takes its time.

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Call:
        call = Call((callback, args))
        self._ready.append(call)
        return call

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Call:
        return self._timers.add(when, callback, args)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Call:
        return self._timers.add(self._now + delay, callback, args)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=name)

    # The rest is called by asyncio itself.

    def _write_to_self(self) -> None:
        """Called with Ctrl-C, to wake a loop that waits. This one never does."""

    def _run_once(self) -> None:
        """Go on until the loop is stopped. asyncio would have this return after every round of callbacks."""
        ready = self._ready
        while not self._stopping:
            if not ready:
                self._advance()
            for _ in range(len(ready)):
                callback, args = ready.popleft()
                if callback is not None:
                    callback(*args)

    def _advance(self) -> None:
        """To the next timer; all that are due then become ready."""
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
    """Who waits, and in which call."""
    chains = Counter(_chain(task.get_coro()) for task in asyncio.all_tasks(loop))
    shown = [f"{number} x {chain}" for chain, number in sorted(chains.items())[:SHOWN]]
    more = f" and {len(chains) - SHOWN} other kinds" if len(chains) > SHOWN else ""
    return f"{chains.total()} tasks wait: " + "; ".join(shown) + more


def _chain(coroutine: Any) -> str:
    """The calls of a coroutine from its outermost to the one that waits."""
    names = []
    while coroutine is not None and hasattr(coroutine, "cr_await"):
        names.append(coroutine.__qualname__)
        coroutine = coroutine.cr_await
    return " > ".join(names)
