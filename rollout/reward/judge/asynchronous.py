"""Asks a reward whose ``score`` is a coroutine function: many questions at one time, on one event loop.

A question that awaits for too long is cancelled. One that blocks the loop cannot be: the watchdog, which the
loop puts off while it runs, ends the process.
"""

import asyncio
import selectors
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

from slipstream.rollout.reward.judge.limits import Bounds
from slipstream.rollout.reward.judge.replies import unscored, waiting_at
from slipstream.rollout.reward.judge.wire import (
    QUESTION,
    REQUEST,
    Question,
    Reply,
    Retiring,
    Unscored,
    framed,
)
from slipstream.rollout.system.stream import FrameReader

P = ParamSpec("P")
T = TypeVar("T")

GRACE_S = 1.0
"""Seconds in which a cancelled question must end. Otherwise the process is replaced, because the question
would go on slowing down the others."""

TICKS = 8
"""Number of times that the time limit is looked at within the time that a question has."""


def answer_at_once(
    connection: socket.socket,
    score: Callable[[Question], Any],
    bounds: Bounds,
    reply_with: Callable[[Question, object], Reply],
) -> None:
    """Answer questions until the connection ends. ``reply_with``: makes a reply of what ``score`` returns."""
    selector = selectors.EpollSelector()
    loop = asyncio.SelectorEventLoop(selector)
    asyncio.set_event_loop(loop)
    loop.set_default_executor(_Threads())
    bounds.forks.in_fork = partial(_disable, loop, selector)
    judge = _Overlapping(score, bounds, loop, reply_with)
    loop.run_until_complete(loop.create_unix_connection(lambda: judge, sock=connection))
    while not judge.ended:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            """Raised in a task that user code has started, whose result it is as well. Here it is noise."""
        bounds.forks.leave_if_forked()


def _disable(loop: asyncio.AbstractEventLoop, selector: selectors.EpollSelector) -> None:
    """Keep a fork that returns to the loop from running the other questions. Its next turn fails.

    The descriptor of the selector is shared with the parent, which must not notice anything.
    """
    getattr(loop, "_ready", deque[object]()).clear()
    selector.close()


def _named(function: FunctionType, name: str) -> Callable[..., Coroutine[Any, Any, None]]:
    """Return a copy of a coroutine function under another name.

    The traceback of a process that dies, which no Python code can write any more, then names the question.
    """
    return FunctionType(function.__code__.replace(co_name=name), function.__globals__)


_open_question: ContextVar["_Open | None"] = ContextVar("_open_question", default=None)
"""The question for which code runs."""


@dataclass(eq=False)
class _Open:
    """A question that has not been answered, or that has not ended although its time is over."""

    number: int
    deadline: float
    task: "asyncio.Task[None]" = field(init=False)
    threads: list["Future[Any]"] = field(default_factory=list["Future[Any]"])
    """Work that the question has given to threads, as with ``asyncio.to_thread``."""
    postponed: bool = False
    answered: bool = False

    def goes_on(self) -> bool:
        """True if anything of the question still runs."""
        return not self.task.done() or any(work.running() for work in self.threads)


class _Threads(ThreadPoolExecutor):
    """The event loop's default executor, which knows which question has given it work."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        work = super().submit(fn, *args, **kwargs)
        question = _open_question.get()
        if question is not None:
            question.threads.append(work)
        return work


class _Overlapping(asyncio.Protocol):
    """The connection to the pool, and the open questions."""

    def __init__(
        self,
        score: Callable[[Question], Any],
        bounds: Bounds,
        loop: asyncio.AbstractEventLoop,
        reply_with: Callable[[Question, object], Reply],
    ) -> None:
        self._score = score
        self._reply_with = reply_with
        self._bounds = bounds
        self._loop = loop
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._open: dict[int, _Open] = {}
        self._replies: list[Reply] = []
        self._interval = min(1.0, bounds.timeout_s / TICKS)
        self._ticker: asyncio.TimerHandle | None = None
        self._next_tick = 0.0
        self.ended = False

    # -- The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            request = REQUEST.decode(frame)
            if isinstance(request, Question):
                self._begin(request)
            elif question := self._open.get(request.number):
                self._give_up(question, Unscored(question.number, "it is not needed any more"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        self._loop.stop()

    def _reply(self, reply: Reply) -> None:
        """Send a reply, together with all others of this turn of the loop."""
        if not self._replies:
            self._loop.call_soon(self._flush)
        self._replies.append(reply)

    def _flush(self) -> None:
        replies, self._replies = self._replies, []
        if self._transport is not None:
            self._transport.write(b"".join(map(framed, replies)))

    # -- Questions

    def _begin(self, request: Question) -> None:
        question = _Open(request.number, self._loop.time() + self._bounds.timeout_s)
        if not self._open:
            self._bounds.watchdog.arm(self._bounds.timeout_s)
            self._schedule_tick()
        self._open[question.number] = question
        judge = _named(_Overlapping._judge, f"{QUESTION}{question.number}")
        question.task = self._loop.create_task(judge(self, question, request))
        question.task.add_done_callback(partial(self._on_end, question))

    async def _judge(self, question: _Open, request: Question) -> None:
        _open_question.set(question)
        self._bounds.home.restore()
        try:
            reply = self._reply_with(request, await self._score(request))
        except BaseException as error:  # exits and cancellations included: none of them is meant for us
            if question.answered:
                return
            reply = unscored(question.number, error)
        self._answer(question, reply)

    def _on_end(self, question: _Open, task: "asyncio.Task[None]") -> None:
        """Answer a question whose task user code has cancelled before it could begin."""
        self._answer(question, unscored(question.number, asyncio.CancelledError()))

    def _answer(self, question: _Open, reply: Reply) -> None:
        if question.answered:
            return
        question.answered = True
        del self._open[question.number]
        reason = self._bounds.memory.verdict()
        if reason is not None:
            self._reply(Retiring(reason))
        self._reply(reply)
        if not self._open:
            self._bounds.watchdog.disarm()
            if self._ticker is not None:
                self._ticker.cancel()

    def _give_up(self, question: _Open, reply: Reply) -> None:
        """Answer a question that has not ended, and end it."""
        self._answer(question, reply)
        question.task.cancel()
        self._loop.call_later(GRACE_S, self._look_after, question)

    def _look_after(self, question: _Open) -> None:
        if question.goes_on():
            self._reply(Retiring("a question goes on although it was cancelled"))

    # -- Time

    def _schedule_tick(self) -> None:
        self._next_tick = self._loop.time() + self._interval
        deadline = min((question.deadline for question in self._open.values()), default=self._next_tick)
        self._next_tick = min(self._next_tick, deadline)
        self._ticker = self._loop.call_at(self._next_tick, self._tick)

    def _tick(self) -> None:
        """Put off the watchdog, and end the questions whose time is over."""
        self._bounds.watchdog.arm(self._bounds.timeout_s)
        now = self._loop.time()
        late = now - self._next_tick
        for question in list(self._open.values()):
            if question.deadline > now:
                continue
            if late > self._interval and len(self._open) > 1 and not question.postponed:
                # Another question has blocked the loop: what this one awaited may have come meanwhile.
                question.postponed = True
                question.deadline = now + min(late, self._bounds.timeout_s)
            else:
                self._give_up(question, self._overdue(question))
        if self._open:
            self._schedule_tick()

    def _overdue(self, question: _Open) -> Unscored:
        reason = f"it took longer than {self._bounds.timeout_s:g} s ({self._bounds.section}.timeout_s)"
        return Unscored(question.number, f"{reason}. {waiting_at(question.task)}")
